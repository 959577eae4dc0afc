"""Placeholder tokens: which token stands for a feature row of which encoder."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_ds.errors import UserError

KNOWN = {
    "image": ("<|image_pad|>", "<image>", "<|image|>", "<image_soft_token>", "<IMG_CONTEXT>"),
    "audio": ("<|audio_pad|>", "<|AUDIO|>", "<audio>", "<|audio|>", "<audio_soft_token>"),
}
"""Names under which tokenizers already hold such a token, tried in this order; `<image>`, `<audio>` if none
does.
"""


@dataclass(frozen=True)
class Placeholder:
    """token: its text. id: in the tokenizer. added: whether the tokenizer had to grow for it."""

    encoder: str
    modality: str
    token: str
    id: int
    added: bool


def add_placeholders(tokenizer: Any, encoders: Mapping[str, Any]) -> dict[str, Placeholder]:
    """One special token per encoder, reused where the tokenizer has one, otherwise added (in place).

    encoders: name -> its section of the configuration (`modality`, `placeholder`). UserError when two
    encoders take the same modality or share a token, or when a given placeholder is not a single special
    token.
    """
    chosen: dict[str, Placeholder] = {}
    owner: dict[str, str] = {}
    for name, encoder in encoders.items():
        where = f"omni.encoders.{name}"
        if encoder.modality not in KNOWN:
            raise UserError(
                f"{where}.modality is {encoder.modality!r}: only image and audio are supported yet"
            )
        if encoder.modality in owner:
            raise UserError(
                f"{where}: encoder {owner[encoder.modality]!r} takes {encoder.modality} already, and an "
                f"<{encoder.modality}> tag does not say which of the two it means; keep one of them"
            )
        owner[encoder.modality] = name
        token = encoder.placeholder or _existing(tokenizer, encoder.modality) or f"<{encoder.modality}>"
        if any(token == other.token for other in chosen.values()):
            raise UserError(f"{where}.placeholder {token!r} is another encoder's; give each its own")
        added = _ensure_special(tokenizer, token, where)
        chosen[name] = Placeholder(
            name, encoder.modality, token, tokenizer.convert_tokens_to_ids(token), added
        )
    return chosen


def _existing(tokenizer: Any, modality: str) -> str | None:
    present = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    return next((token for token in KNOWN[modality] if token in present), None)


def _ensure_special(tokenizer: Any, token: str, where: str) -> bool:
    """True when the vocabulary grew."""
    from tokenizers import AddedToken

    if not token.strip() or token != token.strip():
        raise UserError(
            f"{where}.placeholder {token!r} is empty or has outer white space; use a name like <image>"
        )
    before = len(tokenizer)
    present = {str(t): t for t in tokenizer.added_tokens_decoder.values()}.get(token)
    if present is None or not present.special or present.lstrip or present.rstrip:
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False)], special_tokens=True)
    ids = tokenizer(f"a{token}b", add_special_tokens=False)["input_ids"]
    if ids.count(tokenizer.convert_tokens_to_ids(token)) != 1:
        raise UserError(
            f"{where}.placeholder {token!r} is not one token of the tokenizer; choose another name"
        )
    return len(tokenizer) > before
