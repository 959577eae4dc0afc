"""Render a conversation and find which characters of the rendering are whose.

HF's assistant mask needs `{% generation %}` in the template and prefix differencing breaks on templates that
rewrite earlier turns, so spans are found by marking: the conversation is rendered once as it is and once with
a private character around every piece of content. Without its marks the second rendering must equal the
first; then the marks say where each piece stands. A thought (`<think>...</think>`) and the answer after it
are separate pieces, because templates move, drop or re-space thoughts.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data.errors import RowError
from data.rows import MEDIA_CHARACTER, REASONING

MARK_BASE = 0xF0000
_THINK_TAG = re.compile(r"(</?think>)")
_EMPTY_THINK = re.compile(r"\s*<think>\s*</think>\s*")
_MEDIA_APART = re.compile(f"({MEDIA_CHARACTER.pattern})")
_OPEN_THINK = re.compile(r"<think>\s*\Z")

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]
"""(messages, add_generation_prompt) -> text; template errors are RowErrors."""


@dataclass(frozen=True)
class Turn:
    """Characters [start, stop) of the rendering that the assistant writes in answer to what precedes them.

    They include thoughts that the template kept, tool calls and the end-of-turn token, not the header and not
    an empty thought. message: index into the messages. closed: whether there is an end-of-turn token.
    """

    message: int
    start: int
    stop: int
    closed: bool


@dataclass(frozen=True)
class Rendered:
    """A conversation as the template writes it.

    turns: the assistant's, in order. contents: per message, the characters [start, stop) that come from it;
    where `exact` is False only the assistant's messages could be told apart.
    """

    text: str
    turns: tuple[Turn, ...]
    contents: tuple[tuple[tuple[int, int], ...], ...]
    exact: bool


class ChatRenderer:
    """Spans of conversations under one template.

    render: the template. end_of_turn: pattern of the tokens that may end a turn (special tokens that are no
    placeholders).
    """

    def __init__(self, render: Render, end_of_turn: re.Pattern[str]):
        self.render = render
        self.end_of_turn = end_of_turn
        self.headers = _generation_prompts(render)
        self.usual_end = _usual_end(render, end_of_turn)

    def with_render(self, render: Render) -> "ChatRenderer":
        """The same template with other arguments (tools)."""
        other = copy.copy(self)
        other.render = render
        return other

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> Rendered:
        """RowError when the template fails or its rendering cannot be aligned."""
        text = self.render(messages, False)
        marks = self._marks(text, messages, everyone=True)
        exact = marks is not None
        if marks is None:
            marks = self._marks(text, messages, everyone=False)
        if marks is None:
            raise RowError("chat template changes marked content", "assistant spans cannot be found")
        turns = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and marks[index]:
                turns.append(self._turn(text, messages, marks, index))
        contents = tuple(tuple(zip(found[::2], found[1::2], strict=True)) for found in marks)
        return Rendered(text, tuple(turns), contents, exact)

    def _marks(
        self, text: str, messages: Sequence[Mapping[str, Any]], *, everyone: bool
    ) -> list[list[int]] | None:
        """Offsets in `text` of each message's marks, or None when marking changes what the template does."""
        marked = [
            _mark(message, chr(MARK_BASE + index)) if everyone or message["role"] == "assistant" else message
            for index, message in enumerate(messages)
        ]
        try:
            second = self.render(marked, False)
        except RowError:
            return None
        marks: list[list[int]] = [[] for _ in messages]
        plain, start = [], 0
        offset = 0
        for match in re.finditer(f"[{chr(MARK_BASE)}-{chr(MARK_BASE + len(messages))}]", second):
            offset += match.start() - start
            plain.append(second[start : match.start()])
            marks[ord(match[0]) - MARK_BASE].append(offset)
            start = match.end()
        plain.append(second[start:])
        if "".join(plain) != text or any(len(found) % 2 for found in marks):
            return None
        return marks

    def _turn(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        marks: Sequence[Sequence[int]],
        index: int,
    ) -> Turn:
        first, last = marks[index][0], marks[index][-1]
        floor = max((found[-1] for found in marks[:index] if found), default=0)
        ceiling = min((found[0] for found in marks[index + 1 :] if found), default=len(text))
        start = self._start(text, messages, index, floor, first)
        empty = _EMPTY_THINK.match(text, start, first)
        if empty:
            start = empty.end()
        end = self._end(text, last, ceiling, calls="tool_calls" in messages[index])
        return Turn(index, start, last if end is None else end, end is not None)

    def _end(self, text: str, last: int, ceiling: int, *, calls: bool) -> int | None:
        """End of the first special token after the content; tool calls may close with others before that."""
        if calls and self.usual_end:
            found = text.find(self.usual_end, last, ceiling)
            if found >= 0:
                return found + len(self.usual_end)
        end = self.end_of_turn.search(text, last, ceiling)
        return end.end() if end else None

    def _start(
        self, text: str, messages: Sequence[Mapping[str, Any]], index: int, floor: int, first: int
    ) -> int:
        """End of the turn's header: where generation would begin."""
        for header in self.headers:
            found = text.rfind(header, floor, first)
            if found >= 0:
                return found + len(header)
        if messages[index].get("tool_calls") and index:
            # No generation prompt and the call's opening words are not marked: the prefix says where they
            # begin.
            try:
                prefix = self.render(messages[:index], True)
            except RowError:
                prefix = ""
            if prefix and text.startswith(prefix) and len(prefix) <= first:
                return len(prefix)
        opening = _OPEN_THINK.search(text, floor, first)
        return opening.start() if opening else first


def _generation_prompts(render: Render) -> tuple[str, ...]:
    """What the template appends to ask for an answer; as a second form, that without a thought."""
    probe = [{"role": "user", "content": "x"}]
    try:
        bare, asking = render(probe, False), render(probe, True)
    except RowError:
        return ()
    prompt = asking[len(bare) :] if asking.startswith(bare) else ""
    variants = dict.fromkeys((prompt, prompt.partition("<think>")[0]))
    return tuple(variant for variant in variants if variant.strip())


def _usual_end(render: Render, end_of_turn: re.Pattern[str]) -> str:
    """The token that ends an answer without tool calls."""
    try:
        text = render([{"role": "user", "content": "x"}, {"role": "assistant", "content": "probe"}], False)
    except RowError:
        return ""
    found = end_of_turn.search(text, max(0, text.rfind("probe")))
    return found[0] if found else ""


def _mark(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """The message with `mark` at both ends of every piece of content that is not white space."""
    marked = copy.deepcopy(dict(message))
    if message["role"] == "assistant":
        if message["content"] is not None:
            pieces = _THINK_TAG.split(message["content"])
            marked["content"] = "".join(
                piece if _THINK_TAG.fullmatch(piece) else _around(piece, mark) for piece in pieces
            )
        for name in REASONING:
            if isinstance(message.get(name), str):
                marked[name] = _around(message[name], mark)
        for call in marked.get("tool_calls", ()):
            _mark_call(call.get("function", call), mark)
    else:
        marked["content"] = _around(message["content"], mark)
    return marked


def _mark_call(function: dict[str, Any], mark: str) -> None:
    if isinstance(function.get("name"), str):
        function["name"] = _around(function["name"], mark)
    if "arguments" in function:
        function["arguments"] = _mark_strings(function["arguments"], mark)


def _mark_strings(value: Any, mark: str) -> Any:
    if isinstance(value, str):
        return _around(value, mark)
    if isinstance(value, dict):
        return {key: _mark_strings(entry, mark) for key, entry in value.items()}
    return [_mark_strings(entry, mark) for entry in value] if isinstance(value, list) else value


def _around(text: str, mark: str) -> str:
    """Marks around each stretch of text between media, because a template may put tokens of its own around
    those; inside the outer white space, so that a template that strips does the same with them."""
    return "".join(
        piece if MEDIA_CHARACTER.fullmatch(piece) else _around_words(piece, mark)
        for piece in _MEDIA_APART.split(text)
    )


def _around_words(text: str, mark: str) -> str:
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    return f"{text[:start]}{mark}{core}{mark}{text[start + len(core) :]}"
