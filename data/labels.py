"""Which characters, and then which tokens, are targets."""

import unicodedata
from typing import Any

import numpy as np

from data.chat import Rendered
from data.errors import RowError
from data.rows import Sample

IGNORED = -100
Ranges = list[tuple[int, int]]
"""Character ranges [start, stop)."""


def target_ranges(sample: Sample, rendered: Rendered, loss_on: str) -> Ranges:
    """What of a rendered conversation is to be learnt.

    loss_on: "assistant" every assistant turn, "last_assistant" the last one, "all" every character of the
    rendering. A message with `"loss": false` is left out in each case.
    """
    silent = {i for i, message in enumerate(sample.messages) if message.get("loss") is False}
    turns = {turn.message: (turn.start, turn.stop) for turn in rendered.turns}
    if loss_on == "all":
        holes = [piece for i in silent for piece in ([turns[i]] if i in turns else rendered.contents[i])]
        return gaps(0, len(rendered.text), sorted(holes))
    assistants = [i for i, message in enumerate(sample.messages) if message["role"] == "assistant"]
    ranges = []
    for i in assistants[-1:] if loss_on == "last_assistant" else assistants:
        if i in silent:
            continue
        if i not in turns:
            raise RowError(
                "an assistant message is empty or not rendered",
                f'message {i}: give it content, or "loss": false',
            )
        ranges.append(turns[i])
    return ranges


def gaps(start: int, stop: int, holes: Ranges) -> Ranges:
    """[start, stop) without the holes, which are sorted and do not overlap."""
    ranges = []
    for hole_start, hole_stop in holes:
        if start < hole_start:
            ranges.append((start, hole_start))
        start = max(start, hole_stop)
    return [*ranges, (start, stop)] if start < stop else ranges


def target_tokens(text: str, offsets: np.ndarray, ranges: Ranges) -> list[slice]:
    """Runs of tokens that make up each range.

    offsets: int64 [t, 2], characters of each token. RowError when a token also covers neighbouring characters
    other than white space: the model would learn a token that no prompt leaves it to write.
    """
    starts, stops = offsets[:, 0], offsets[:, 1]
    runs = []
    for start, stop in ranges:
        inside = np.flatnonzero((stops > start) & (starts < stop) & (stops > starts))
        if not len(inside):
            continue
        run = slice(int(inside[0]), int(inside[-1]) + 1)
        before, after = text[starts[run.start] : start], text[stop : stops[run.stop - 1]]
        if before.strip() or after.strip():
            raise RowError(
                "target does not decode back to the message",
                f"one token joins {before!r} or {after!r} of the template with the message",
            )
        runs.append(run)
    return runs


def check_decodes(tokenizer: Any, text: str, ids: np.ndarray, ranges: Ranges, runs: list[slice]) -> None:
    """RowError unless the tokens of each run say what the characters of its range say, white space aside."""
    for (start, stop), run in zip((r for r in ranges if text[r[0] : r[1]].strip()), runs, strict=True):
        decoded = tokenizer.decode(
            ids[run].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if _essence(decoded) != _essence(text[start:stop]):
            raise RowError(
                "target does not decode back to the message",
                f"{decoded[:60]!r} for {text[start:stop][:60]!r}",
            )


def _essence(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).replace("\N{LOWER ONE EIGHTH BLOCK}", " ").split())


def shift_labels(input_ids: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """int64 [T]: at t the token that t predicts, token t + 1 where it is a target, IGNORED elsewhere."""
    labels = np.full_like(input_ids, IGNORED)
    labels[:-1] = np.where(targets[1:], input_ids[1:], IGNORED)
    return labels
