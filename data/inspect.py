"""Samples as the model sees them, for `--inspect`: tokens with targets marked, media with rows, positions."""

from itertools import groupby
from typing import Any

from data.dataset import IndexedDataset
from data.labels import IGNORED
from omni_ds.plan.sample import SampleMeta

OPEN, CLOSE = "⟦", "⟧"
_PER_LINE = 12


def inspect_samples(dataset: IndexedDataset, n: int) -> str:
    """Text about `n` samples: the first of every source, then the second of every source, and so on.

    Targets stand between ⟦ and ⟧: the tokens that are predicted, each from the position before it. A run of
    placeholders is written once with its count.
    """
    blocks = [dataset.text.describe()]
    deepest = max(dataset.sizes, default=0)
    order = [
        start + k for k in range(min(n, deepest)) for start, stop in dataset.source_ranges if start + k < stop
    ]
    blocks += [inspect_sample(dataset, row) for row in order[:n]]
    return "\n\n".join(block for block in blocks if block) + "\n"


def inspect_sample(dataset: IndexedDataset, row: int) -> str:
    """One sample: where it is from, its text, its media, and a table of its tokens outside of media."""
    sample = dataset.encode(row)
    meta, last = sample.meta, sample.positions.max()
    predicted = [False, *(sample.labels[:-1] != IGNORED).tolist()]
    ids = sample.input_ids.tolist()
    tokenizer = dataset.text.tokenizer
    words = [tokenizer.decode([token]) for token in ids]
    lines = [
        f"sample {row} ({dataset.where(row)}){': task ' + meta.task if meta.task else ''}",
        f"{meta.tokens} tokens at positions 0 to {last:.6g}, {meta.target_tokens} of them targets",
    ]
    lines += [f"  {_item_line(item)}" for item in meta.items]
    lines += [f"  | {line}" for line in _marked(tokenizer, ids, predicted, meta).split("\n")]
    lines.append("  positions of targets, with token ids:")
    targets = [f"{at}:{words[at]!r}={ids[at]}" for at, target in enumerate(predicted) if target]
    for first in range(0, len(targets), _PER_LINE):
        lines.append("    " + " ".join(targets[first : first + _PER_LINE]))
    return "\n".join(lines)


def _item_line(item) -> str:
    segments = _runs(item.segments)
    places = ", ".join(f"{start} to {start + length - 1}" for start, length in item.spans)
    return (
        f"medium {item.ordinal}: {item.encoder}, {_size(item)}, {segments} encoder tokens, {item.rows} "
        f"feature rows at positions {places}"
    )


def _size(item) -> str:
    if len(item.shape) == 1:
        return f"{item.shape[0]} mel frames"
    pixels = f"{item.shape[-2]} x {item.shape[-1]} pixels"
    if len(item.shape) == 2:
        return pixels
    if len(item.shape) == 4:
        high, wide = item.shape[:2]
        return f"{pixels}, the whole" + (f" and {high} x {wide} tiles" if high * wide else "")
    if not item.seconds:
        return f"{item.shape[0]} tiles of {pixels}"
    return f"{item.shape[0]} frames of {pixels}, {item.seconds:.4g} s a step"


def _runs(segments) -> str:
    """12 + 12 + 12 + 8 as 3 * 12 + 8."""
    words = []
    for length, same in groupby(segments):
        count = len(list(same))
        words += [f"{count} * {length}"] if count > 2 else [str(length)] * count
    return " + ".join(words)


def _marked(tokenizer: Any, ids: list[int], predicted: list[bool], meta: SampleMeta) -> str:
    """The decoded sample, with runs of targets in brackets and each medium's placeholders once.

    Whole runs are decoded, because a character may be spread over several tokens.
    """
    lengths = {start: length for item in meta.items for start, length in item.spans}
    out, inside, at = [], False, 0
    while at < len(ids):
        if predicted[at] != inside:
            out.append(CLOSE if inside else OPEN)
            inside = predicted[at]
        stop = at + 1
        if at in lengths:
            out.append(f"{tokenizer.decode([ids[at]])}*{lengths[at]} ")
            at += lengths[at]
            continue
        while stop < len(ids) and predicted[stop] == inside and stop not in lengths:
            stop += 1
        out.append(tokenizer.decode(ids[at:stop]))
        at = stop
    return "".join(out) + (CLOSE if inside else "")
