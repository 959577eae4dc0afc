"""The text and media side of a configuration: tokenizer with placeholders, one preprocessing each."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.hub_files import side_file
from data.model_text import ModelTextProcessor
from data.omni_positions import ClockPositions
from data.omni_text import OmniTextProcessor
from data.placeholders import Placeholder, add_placeholders
from data.positions import GridPositions
from data.preprocess import Preprocess, build_preprocess
from data.text import TextProcessor
from omni_ds.errors import UserError


def build_text(config: Any) -> TextProcessor:
    """Tokenizer of the LLM, chat template of `omni.data` or the tokenizer's, placeholders of the encoders.

    config: the `Config`. UserError when the tokenizer is missing or slow, or the template file does not
    exist.
    """
    data = config.omni.data
    tokenizer = load_tokenizer(config.omni.llm)
    placeholders = add_placeholders(tokenizer, config.omni.encoders)
    return TextProcessor(
        tokenizer,
        placeholders,
        chat_template=read_template(data.chat_template),
        chat_template_kwargs=data.chat_template_kwargs,
        loss_on=data.loss_on,
    )


def build_model_text(config: Any, checkpoint: Any, metas: Sequence[Any]) -> TextProcessor:
    """Tokenizer and chat template of the checkpoint `omni.model`.

    checkpoint: the `Multimodal`, whose family says whether features have positions in the grids of their
    encoders (`GridPositions`, with a clock `ClockPositions`; else positions count the tokens). metas:
    `EncoderMeta`s.
    """
    model, data, family = config.omni.model, config.omni.data, checkpoint.family
    part = config.omni.llm.model_copy(
        update={"path": model.path, "trust_remote_code": model.trust_remote_code}
    )
    tokenizer = load_tokenizer(part, "omni.model.path")
    placeholders = {}
    for meta in metas:
        for modality in meta.modalities:
            tokens = checkpoint.towers[meta.name].tokens
            token = tokens.get(modality, tokens.get(meta.modality))  # frames may stand as images do
            if token is None:
                raise UserError(
                    f"omni.model.path: config.json of {model.path} does not say which token stands for "
                    f"{modality}"
                )
            name = meta.name if modality == meta.modality else f"{meta.name}.{modality}"
            word = tokenizer.convert_ids_to_tokens(token)
            placeholders[name] = Placeholder(meta.name, modality, word, token, added=False)
    given = {
        "chat_template": read_template(data.chat_template) or processor_template(model.path),
        "chat_template_kwargs": data.chat_template_kwargs,
        "loss_on": data.loss_on,
        "written": family.written(checkpoint.config, tokenizer),
    }
    seen = {meta.name: meta for meta in metas if meta.modality == "image"}
    if (clock := checkpoint.clock) is not None:
        (temporal,) = {meta.temporal for meta in seen.values()}
        text = OmniTextProcessor(tokenizer, placeholders, clock, temporal, **given)
        text.positions = ClockPositions(seen, clock)
        return text
    text = ModelTextProcessor(tokenizer, placeholders, **given)
    text.blocks, text.spelled = family.blocks, family.spelled(checkpoint.config, tokenizer)
    if family.grid_positions:
        text.positions = GridPositions(seen)
    return text


def processor_template(path: str) -> str | None:
    """The chat template that a checkpoint's processor brings, in any of the files it may be in; None: it is
    the tokenizer's."""
    for name in ("chat_template.jinja", "chat_template.json", "processor_config.json"):
        file = side_file(path, name)
        if file is None:
            continue
        content = file.read_text()
        template = content if name.endswith(".jinja") else json.loads(content).get("chat_template")
        if template:
            return template
    return None


def build_media(config: Any, encoder_configs: Mapping[str, Any]) -> dict[str, Preprocess]:
    """Preprocessing by encoder. encoder_configs: name -> HF config of the tower."""
    sections = config.omni.encoders
    if (model := config.omni.model) is not None:
        given = {"path": model.path, "trust_remote_code": model.trust_remote_code}
        sections = {name: encoder.model_copy(update=given) for name, encoder in sections.items()}
    return {
        name: build_preprocess(name, encoder, encoder_configs[name].to_dict())
        for name, encoder in sections.items()
    }


def load_tokenizer(llm: Any, key: str = "omni.llm.path") -> Any:
    """The HF tokenizer of `omni.llm`: `tokenizer`, else the one in `path`, which is from `key`."""
    from transformers import AutoTokenizer

    path = llm.tokenizer or llm.path
    key = "omni.llm.tokenizer" if llm.tokenizer or not llm.path else key
    if path is None:
        raise UserError(
            f"{key}: a model made from an inline config has no tokenizer; name a folder or hub name"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=llm.trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{key}: no tokenizer can be loaded from {path}: {reason}") from None
    if not getattr(tokenizer, "is_fast", False):  # mistral-common's has no such attribute
        raise UserError(
            f"{key}: the tokenizer of {path} is a slow one, which does not say where its tokens stand in "
            "the text; convert it to tokenizer.json"
        )
    if not tokenizer.encode("a 1", add_special_tokens=False):  # what transformers makes of config.json alone
        raise UserError(
            f"{key}: the tokenizer of {path} has no vocabulary; are its files there? Copy them, or name "
            "another folder with omni.llm.tokenizer"
        )
    return tokenizer


def read_template(template: str | None) -> str | None:
    """The chat template itself: inline jinja as it is, anything else as a file."""
    if template is None or "{%" in template or "{{" in template:
        return template
    path = Path(template).expanduser()
    if not path.is_file():
        raise UserError(
            f"omni.data.chat_template: {template} is neither a file (in {Path.cwd()}) nor a jinja template"
        )
    return path.read_text()
