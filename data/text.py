"""From a sample to token ids, targets and placeholder slots: tokenizer, chat template and label rule in one
object.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from data.chat import ChatRenderer, Rendered
from data.errors import RowError
from data.labels import Ranges, check_decodes, target_ranges, target_tokens
from data.media import MediaRef
from data.media_words import Word, media_order, placed, put_words
from data.placeholders import Placeholder
from data.planned import Planned
from data.positions import Positions, sequence_positions
from data.rows import Sample
from data.tokenised import Runs, Tokenised


class TextProcessor:
    """Tokenizer, chat template, label rule and placeholders.

    tokenizer: a fast HF tokenizer to which the placeholder tokens are already added (`add_placeholders`).
    placeholders: encoder name -> its token, and "encoder.modality" for what else it takes. loss_on:
    "assistant", "last_assistant" or "all". blocks: whether consecutive feature rows of a sample attend to
    each other in both directions. spelled: modality -> text for a medium with a placeholder for each run of
    its feature rows, all equally long; else it has one.
    """

    def __init__(
        self,
        tokenizer: Any,
        placeholders: Mapping[str, Placeholder],
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        loss_on: str = "assistant",
    ):
        self.tokenizer = tokenizer
        self.placeholders = dict(placeholders)
        self.chat_template = chat_template or _default_template(tokenizer.chat_template)
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.loss_on = loss_on
        self._by_modality = {p.modality: p for p in self.placeholders.values()}
        own = {p.token for p in self.placeholders.values()}
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} | own
        special |= {token for token in (tokenizer.eos_token, tokenizer.bos_token) if token}
        self._special = any_of(special)
        self._parts = self._takes_parts()
        ends = special - own - ({tokenizer.bos_token} - {tokenizer.eos_token})
        self._chat = ChatRenderer(self._render(None), any_of(ends))
        self.positions: Positions = sequence_positions
        self.blocks = False
        self.spelled: Mapping[str, Callable[[Planned], str]] = {}
        self._bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]

    @property
    def modalities(self) -> tuple[str, ...]:
        return tuple(self._by_modality)

    @property
    def vocabulary_size(self) -> int:
        """Rows the embedding needs at least: the largest token id that can occur, plus one."""
        return max(self.tokenizer.get_vocab().values()) + 1

    def describe(self, embedding_rows: int | None = None) -> str:
        """What stands for media in the text. embedding_rows: those of the LLM before training."""
        lines = []
        for name, placeholder in self.placeholders.items():
            origin = "added to the tokenizer" if placeholder.added else "already in the tokenizer"
            lines.append(f"{name}: {placeholder.token} (id {placeholder.id}, {origin}), once per feature row")
        if not lines or embedding_rows is None:
            return "\n".join(lines)
        if self.vocabulary_size > embedding_rows:
            lines.append(
                f"the embedding grows from {embedding_rows} to {self.vocabulary_size} rows; in the "
                "input, features take the place of the new ones, and as outputs they are never a target"
            )
        else:
            lines.append(f"the embedding keeps its {embedding_rows} rows")
        return "\n".join(lines)

    def tokenise(self, sample: Sample, planned: Sequence[Planned] = (), *, verify: bool = True) -> Tokenised:
        """planned: the media, for texts that depend on their shapes and times.

        RowError: the template fails, no target is left, with verify a target does not decode back.
        """
        if sample.messages is None:
            text, targets, literal = sample.text, [(0, len(sample.text))], [(0, len(sample.text))]
        else:
            rendered = self._closed(sample, self._rendered(sample))
            text, targets = rendered.text, target_ranges(sample, rendered, self.loss_on)
            literal = sorted(piece for pieces in rendered.contents for piece in pieces)
        order = media_order(text, len(placed(sample.media)))
        words = [self._word(sample, planned, ordinal) for ordinal in order]
        text, targets, literal = put_words(text, targets, literal, [word.text for word in words])
        ids, offsets = self._encode(text, literal)
        learnt = target_tokens(text, offsets, targets)
        if verify:
            check_decodes(self.tokenizer, text, ids, targets, learnt)
        mask = np.zeros(len(ids), dtype=bool)
        for tokens in learnt:
            mask[tokens] = True
        if sample.messages is None:
            ids, mask = self._delimit(ids, mask)
        runs = tuple(run for word in words for run in word.runs)
        slots = self._slots(ids, sample, runs)
        mask[list(slots)] = False
        if not mask[1:].any():
            raise RowError(
                "no target token", f"nothing in the row is to be learnt with loss_on {self.loss_on!r}"
            )
        return Tokenised(ids, mask, slots, runs)

    def _render(self, tools: Sequence[Any] | None, media: Sequence[MediaRef] = ()) -> Any:
        def render(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
            try:
                return self.tokenizer.apply_chat_template(
                    [self._for_template(message, media) for message in messages],
                    tools=tools,
                    chat_template=self.chat_template,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **self.chat_template_kwargs,
                )
            except Exception as error:  # templates are programs, and may fail on purpose
                raise RowError("chat template failed", f"{type(error).__name__}: {error}") from None

        return render

    def _for_template(self, message: Mapping[str, Any], media: Sequence[MediaRef]) -> dict[str, Any]:
        given = {key: value for key, value in message.items() if key != "loss"}
        if self._parts:
            given["content"] = [{"type": "text", "text": message["content"]}]
        return given

    def _takes_parts(self) -> bool:
        """Whether the template wants content as a list of parts: it loses a string and not a text part."""
        probe = [{"role": "user", "content": "probe"}]
        for parts in (False, True):
            self._parts = parts
            try:
                if self.chat_template and "probe" in self._render(None)(probe, False):
                    return parts
            except RowError:
                continue
        return False

    def _rendered(self, sample: Sample) -> Rendered:
        if not self.chat_template:
            raise RowError("no chat template", "the tokenizer has none: set omni.data.chat_template")
        rendered = self._chat.with_render(self._render(sample.tools, sample.media))(sample.messages)
        unmarked = json.dumps(sample.tools, ensure_ascii=False, default=str) if sample.tools else ""
        if not rendered.exact:
            unmarked += json.dumps(sample.messages, ensure_ascii=False, default=str)
        if found := self._special.search(unmarked):
            raise RowError("text contains a special token", f"{found[0]!r} in tools or in content that moves")
        return rendered

    def _closed(self, sample: Sample, rendered: Rendered) -> Rendered:
        """End the last message with the end-of-text token where the template leaves it open.

        Without it nothing would teach the model to stop.
        """
        eos = self.tokenizer.eos_token
        last = rendered.turns[-1] if rendered.turns else None
        if not eos or last is None or last.closed or last.message != len(sample.messages) - 1:
            return rendered
        if rendered.text[last.stop :].strip():
            return rendered
        closed = replace(last, stop=last.stop + len(eos), closed=True)
        text = rendered.text[: last.stop] + eos
        return replace(rendered, text=text, turns=(*rendered.turns[:-1], closed))

    def _word(self, sample: Sample, planned: Sequence[Planned], ordinal: int) -> Word:
        """What stands for a medium: its placeholder token, once for each run of its rows."""
        modality = sample.media[ordinal].modality
        token = self._by_modality[modality].token
        if (spell := self.spelled.get(modality)) is None:
            return Word(token, ((ordinal, None),))
        text = spell(planned[ordinal])
        count = text.count(token)
        return Word(text, ((ordinal, planned[ordinal].rows // count),) * count)

    def _encode(self, text: str, literal: Ranges) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 [t], offsets int64 [t, 2]). A special token's name inside a literal range is ordinary
        text.
        """
        found = list(self._special.finditer(text))
        real = [m for m in found if not any(a <= m.start() and m.end() <= b for a, b in literal)]
        if len(real) == len(found):
            return self._plain(text, 0, split_special_tokens=False)
        parts, at = [], 0
        for match in real:
            parts.append(self._plain(text[at : match.start()], at, split_special_tokens=True))
            token = self.tokenizer.convert_tokens_to_ids(match[0])
            parts.append((np.array([token]), np.array([match.span()])))
            at = match.end()
        parts.append(self._plain(text[at:], at, split_special_tokens=True))
        return np.concatenate([ids for ids, _ in parts]), np.concatenate([offsets for _, offsets in parts])

    def _plain(self, text: str, start: int, *, split_special_tokens: bool) -> tuple[np.ndarray, np.ndarray]:
        encoded = self.tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            split_special_tokens=split_special_tokens,
            verbose=False,
        )
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2) + start
        return np.array(encoded["input_ids"], dtype=np.int64), offsets

    def _delimit(self, ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A plain text begins as the tokenizer begins one and ends with the end-of-text token, a target as
        well.
        """
        if self._bos and ids[0] != self.tokenizer.bos_token_id:
            ids, mask = np.append(self.tokenizer.bos_token_id, ids), np.append(False, mask)
        eos = self.tokenizer.eos_token_id
        if eos is not None and ids[-1] != eos:
            ids, mask = np.append(ids, eos), np.append(mask, True)
        return ids, mask

    def _slots(self, ids: np.ndarray, sample: Sample, runs: Runs) -> tuple[int, ...]:
        """Positions of the placeholder tokens, which must be those of the row's media in order."""
        wanted = [self._by_modality[sample.media[ordinal].modality].id for ordinal, _ in runs]
        own = {placeholder.id for placeholder in self.placeholders.values()}
        tokens = ids.tolist()
        slots = tuple(at for at, token in enumerate(tokens) if token in own)
        if [tokens[slot] for slot in slots] != wanted:
            raise RowError(
                "placeholder tokens do not match the media", f"{len(slots)} tokens for {len(wanted)} media"
            )
        return slots


def _default_template(template: str | Mapping[str, str] | None) -> str | None:
    """The one template, of several by name the one called default."""
    return template.get("default") if isinstance(template, Mapping) else template


def any_of(tokens: Iterable[str | None]) -> re.Pattern[str]:
    """Pattern of any of the tokens, longer ones first; of nothing when there is none."""
    names = sorted((token for token in tokens if token), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) if names else r"(?!)")
