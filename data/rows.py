"""A row of a data set, whatever its form, as one shape: messages with placed media, or plain text."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import RowError
from data.media import MediaRef, media_ref

MEDIA_BASE = 0x100000
"""Character `chr(MEDIA_BASE + n)` (private use) stands in texts for the n-th medium of a row."""
MAX_MEDIA = 4096
MEDIA_CHARACTER = re.compile(f"[{chr(MEDIA_BASE)}-{chr(MEDIA_BASE + MAX_MEDIA - 1)}]")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Under these names a message can hold its thought apart from its content."""

_COLUMN = {"image": "images", "audio": "audios", "video": "videos"}
_TAG = re.compile(r"<(image|audio|video)>")
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "assistant": "assistant", "model": "assistant", "bot": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function_response": "tool", "function_call": "assistant",
    "developer": "developer",
}  # fmt: skip
_SPELLINGS = {
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
}
_INLINE = ("bytes", "base64", "data", "array", "sampling_rate", "frames", "fps")
_PRIVATE_USE = re.compile("[\U000f0000-\U0010ffff]")


@dataclass(frozen=True)
class Sample:
    """One of messages and text. Texts hold `chr(MEDIA_BASE + n)` where medium n stands.

    messages: dicts with role, content (str; None where there are only tool_calls), and where given
    tool_calls, reasoning_content, name, loss, ...
    """

    messages: tuple[dict[str, Any], ...] | None
    text: str | None
    media: tuple[MediaRef, ...]
    tools: list[Any] | None = None
    task: str = ""


class RowReader:
    """Turns raw rows of one source into samples.

    modalities: those some encoder takes; in their absence a tag such as `<image>` is ordinary text.
    columns: their column -> our column. query: user message for rows that have media and a response only.
    """

    def __init__(
        self,
        modalities: Sequence[str],
        media_dir: Path,
        columns: Mapping[str, str] | None = None,
        query: str | None = None,
    ):
        self.modalities = frozenset(modalities)
        self.media_dir = media_dir
        self.columns = dict(columns or {})
        self.query = query

    def read(self, raw: Any) -> Sample:
        """RowError with a reason when the row cannot be understood."""
        if not isinstance(raw, Mapping):
            raise RowError("row is not an object", type(raw).__name__)
        row = {key: value for key, value in raw.items() if key not in self.columns}
        for theirs, ours in self.columns.items():
            if theirs not in raw:
                raise RowError("mapped column missing", f"{theirs!r} is not among {sorted(raw)}")
            row[ours] = raw[theirs]
        row = {key: value for key, value in row.items() if value is not None}
        placer = _Placer(row, self.modalities, self.media_dir)
        messages = self._messages(row)
        task = str(row.get("task", ""))
        if messages is None:
            if not isinstance(row.get("text"), str):
                raise RowError(
                    "row has no messages, conversations, response or text", f"its columns are {sorted(raw)}"
                )
            text = placer.text(row["text"], strict=False)
            placer.finish()
            if not text.strip():
                raise RowError("empty text")
            return Sample(None, text, tuple(placer.media), None, task)
        messages = tuple(self._message(message, number, placer) for number, message in enumerate(messages))
        if row.get("system") and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": _no_private(str(row["system"]))}, *messages)
        placer.finish()
        return Sample(
            messages, None, tuple(placer.media), _clean(_json_list(row.get("tools"), "tools")), task
        )

    def _messages(self, row: Mapping[str, Any]) -> list[Any] | None:
        if "messages" in row:
            messages = _json_list(row["messages"], "messages")
        elif "conversations" in row or "conversation" in row:
            messages = _json_list(row.get("conversations", row.get("conversation")), "conversations")
        elif "response" in row:
            query = row.get("query", self.query)
            if query is None:
                raise RowError("response without query", "give the set a `query`, or map a column to query")
            messages = [
                {"role": "user", "content": query},
                {"role": "assistant", "content": row["response"]},
            ]
        else:
            return None
        if not messages:
            raise RowError("no messages")
        return messages

    def _message(self, raw: Any, number: int, placer: "_Placer") -> dict[str, Any]:
        if not isinstance(raw, Mapping):
            raise RowError("message is not an object", f"message {number} is a {type(raw).__name__}")
        message = {key: value for key, value in raw.items() if value is not None}
        if "from" in message and "role" not in message:
            message = _sharegpt(message)
        role = _ROLES.get(message.get("role"))
        if role is None:
            raise RowError("unknown role", f"message {number} has role {message.get('role')!r}")
        content = message.get("content")
        message["role"] = role
        if content is None:  # a message of tool calls alone; templates tell null from an empty string
            message["content"] = None if message.get("tool_calls") else ""
        elif isinstance(content, str):
            message["content"] = placer.text(content, strict=True)
        else:
            message["content"] = "".join(placer.part(part) for part in content)
        for name in REASONING:
            if isinstance(message.get(name), str):
                _no_private(message[name])
                message.setdefault(REASONING[0], message[name])  # what most templates read
        if "tool_calls" in message:
            message["tool_calls"] = _clean(_json_list(message["tool_calls"], "tool_calls"))
            if not message["tool_calls"]:
                del message["tool_calls"]
        return message


class _Placer:
    """Hands out the row's media in the order in which texts and parts ask for them."""

    def __init__(self, row: Mapping[str, Any], modalities: frozenset[str], media_dir: Path):
        self.modalities = modalities
        self.media_dir = media_dir
        self.media: list[MediaRef] = []
        self.columns = {m: _media_column(row, m) for m in _COLUMN}
        self.used = dict.fromkeys(_COLUMN, 0)

    def text(self, text: str, *, strict: bool) -> str:
        """Replace tags by placed media.

        A tag is a medium when the row has a column for it. Otherwise it is ordinary text, except that with
        strict a tag of a modality that is trained must be a mistake.
        """
        _no_private(text)

        def place(match: re.Match[str]) -> str:
            modality = match[1]
            if self.columns[modality] is None and not (strict and modality in self.modalities):
                return match[0]
            return self._place(modality, self._next(modality))

        return _TAG.sub(place, text)

    def part(self, part: Any) -> str:
        """One element of a content list. Text parts are taken literally: a tag in them is ordinary text."""
        if isinstance(part, str):
            return _no_private(part)
        if not isinstance(part, Mapping):
            raise RowError("content part is not an object", type(part).__name__)
        part = {key: value for key, value in part.items() if value is not None}
        kind = part.get("type") or next((k for k in ("text", *_COLUMN) if k in part), None)
        if kind == "text":
            return _no_private(str(part.get("text", "")))
        modality = _SPELLINGS.get(kind, kind)
        if modality not in _COLUMN:
            raise RowError("content part of unknown type", repr(kind))
        value = next((part[key] for key in (kind, modality, "path", "url") if key in part), None)
        if value is None:
            value = {key: part[key] for key in _INLINE if key in part} or self._next(modality)
        elif modality == "video" and "fps" in part:
            value = {"frames" if isinstance(value, list | tuple) else "path": value, "fps": part["fps"]}
        return self._place(modality, value)

    def _next(self, modality: str) -> Any:
        column = self.columns[modality] or []
        if self.used[modality] >= len(column):
            raise RowError(
                f"more <{modality}> tags than {_COLUMN[modality]}",
                f"the row's texts ask for more than its {len(column)} {_COLUMN[modality]}",
            )
        self.used[modality] += 1
        return column[self.used[modality] - 1]

    def _place(self, modality: str, value: Any) -> str:
        if modality not in self.modalities:
            taken = " and ".join(["text", *sorted(self.modalities)])
            raise RowError(f"no encoder for {modality}", f"what is trained takes {taken}")
        if len(self.media) == MAX_MEDIA:
            raise RowError("too many media", f"more than {MAX_MEDIA}")
        self.media.append(media_ref(modality, value, self.media_dir))
        return chr(MEDIA_BASE + len(self.media) - 1)

    def finish(self) -> None:
        for modality, column in self.columns.items():
            if column and self.used[modality] < len(column):
                raise RowError(
                    f"more {_COLUMN[modality]} than <{modality}> tags",
                    f"{len(column)} {_COLUMN[modality]}, {self.used[modality]} of them placed by tags",
                )


def _media_column(row: Mapping[str, Any], modality: str) -> list[Any] | None:
    for key in (_COLUMN[modality], modality):
        if key in row:
            value = row[key]
            return list(value) if isinstance(value, list | tuple) else [value]
    return None


def _sharegpt(message: dict[str, Any]) -> dict[str, Any]:
    """`from` / `value` as `role` / `content`; the value of a function_call is a JSON object."""
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    if message["from"] != "function_call":
        return {"role": message["from"], "content": message.get("value", "")} | rest
    try:
        call = json.loads(message["value"])
        function = {"name": call["name"], "arguments": call.get("arguments", {})}
    except (ValueError, KeyError, TypeError) as error:
        raise RowError("function_call is not a JSON object with name and arguments", str(error)) from None
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    } | rest


def _json_list(value: Any, what: str) -> list[Any] | None:
    """A list, also when the column holds it as JSON text or as a numpy array."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise RowError(f"{what} is not valid JSON", str(error)) from None
    if value is None:
        return None
    if not isinstance(value, Sequence) and not hasattr(value, "tolist"):
        raise RowError(f"{what} is not a list", type(value).__name__)
    return list(value) or None


def _clean(value: Any) -> Any:
    """Without the nulls that columnar files add to objects of different keys."""
    if isinstance(value, Mapping):
        return {key: _clean(entry) for key, entry in value.items() if entry is not None}
    return [_clean(entry) for entry in value] if isinstance(value, list) else value


def _no_private(text: str) -> str:
    if _PRIVATE_USE.search(text):
        raise RowError("text has private-use characters", "U+F0000 to U+10FFFF mark media here")
    return text
