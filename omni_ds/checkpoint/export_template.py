"""The chat template of an export: the one trained with, made to take what transformers' processors pass.

Training renders messages whose content is one string with a mark for each medium. Processors pass content as
a list of parts, which templates of text-only models cannot take, and do not know the `chat_template_kwargs`
of the run. A preamble turns parts into one string with placeholder tokens and gives the run's kwargs their
values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

_PARTS = {"image": "['image', 'image_url', 'input_image']", "audio": "['audio', 'audio_url', 'input_audio']"}


def export_template(template: str, placeholders: Mapping[str, str], kwargs: Mapping[str, Any]) -> str:
    """Template source with the preamble.

    Args:
        template: Jinja source used in training.
        placeholders: modality -> token that stands for a feature row.
        kwargs: `omni.data.chat_template_kwargs`; a caller of the template can still override them.
    """
    lines = []
    for key, value in kwargs.items():
        lines += [f"if {key} is not defined", f"set {key} = {_literal(value)}", "endif"]
    if placeholders:
        lines += [
            "set placed = namespace(messages=[])",
            "for message in messages",
            "if message.content is defined and message.content is not none and message.content is not string",
            "set joined = namespace(text='')",
            "for part in message.content",
            "if part is string",
            "set joined.text = joined.text + part",
            "elif part.type == 'text'",
            "set joined.text = joined.text + part.text",
        ]
        for modality, token in placeholders.items():
            lines += [
                f"elif part.type in {_PARTS[modality]}",
                f"set joined.text = joined.text + {_literal(token)}",
            ]
        lines += [
            "endif",
            "endfor",
            "set placed.messages = placed.messages + [dict(message, content=joined.text)]",
            "else",
            "set placed.messages = placed.messages + [message]",
            "endif",
            "endfor",
            "set messages = placed.messages",
        ]
    if not lines:
        return template
    # The closing expression keeps white space at the start of the template; a closing tag would swallow it.
    return "\n".join(f"{{%- {line} -%}}" for line in lines) + "{{- '' }}" + template


def end_of_turn_ids(tokenizer: PreTrainedTokenizerBase, template: str | None) -> list[int]:
    """Token ids that end an answer: the special token the template writes after an assistant message, and
    eos.

    The labels teach the model the first, which for base models' tokenizers is often not their eos token.
    """
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if template:
        answer = "omni answer"
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]
        try:
            text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        except (TemplateError, ValueError, TypeError, KeyError):
            return ids  # a template that wants other roles; eos is what is known
        special = {
            token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        tail = text[text.rfind(answer) + len(answer) :] if answer in text else ""
        found = sorted((tail.find(token), number) for token, number in special.items() if token in tail)
        if found and found[0][1] not in ids:
            ids.insert(0, found[0][1])
    return ids


def _literal(value: Any) -> str:
    """A value as a Jinja literal, which is JSON up to the spelling of null."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: {_literal(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value)
