"""Long media in parts: a recording is cut between its windows, which do not attend to each other.

A part is an item of its own, of the same row and ordinal, that starts at a later window; whoever encodes it
reads its frames alone. Nothing is computed twice and nothing is exchanged, so that the only reason to keep a
clip whole is that it is small beside what a rank encodes in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from omni_ds.plan.cost import EncoderCost
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.sample import Item, SampleMeta

GRAIN = 8  # parts that make up what a rank encodes in a step, at least


def split_recordings(
    samples: Sequence[SampleMeta], cost: EncoderCost, ranks: int, long_short: str | int
) -> tuple[SampleMeta, ...]:
    """Samples with long recordings in parts.

    long_short: "off": none; a number: clips of more encoder tokens than that, into parts of at most as many;
    "auto": into parts of at most 1 / GRAIN of the encoder cost of a rank, of which there are `ranks`.
    """
    cuttable = {name: meta for name, meta in cost.metas.items() if meta.segments_per_slice}
    if long_short == "off" or not cuttable:
        return tuple(samples)
    share = 0
    if long_short == "auto":
        share = sum(cost.total(item) for sample in samples for item in sample.items) // (ranks * GRAIN)

    def parts(item: Item) -> tuple[Item, ...]:
        meta = cuttable.get(item.encoder)
        if meta is None or len(item.segments) <= meta.segments_per_slice:
            return (item,)
        unit = meta.segments_per_slice
        if long_short == "auto":
            whole = max(1, cost.total(item))
            fit = share * len(item.segments) // whole
        else:
            fit = long_short // item.segments[0]
        count = max(unit, fit // unit * unit)
        return (item,) if count >= len(item.segments) else split_item(meta, item, count)

    return tuple(
        sample
        if not any(item.encoder in cuttable for item in sample.items)
        else replace(sample, items=tuple(part for item in sample.items for part in parts(item)))
        for sample in samples
    )


def split_item(meta: EncoderMeta, item: Item, count: int) -> tuple[Item, ...]:
    """Parts of `count` segments each, a multiple of meta.segments_per_slice; the last one may be shorter."""
    frames, result, row = item.shape[0], [], 0
    for first in range(0, len(item.segments), count):
        start = first * meta.window
        length = min(frames - start, count * meta.window)
        segments, rows = meta.measure((length,))
        assert segments == item.segments[first : first + count], "a part differs from its place in the whole"
        spans = cut_spans(item.spans, row, rows)
        result.append(
            replace(
                item, shape=(length,), segments=segments, rows=rows, spans=spans, start=item.start + start
            )
        )
        row += rows
    assert row == item.rows, f"parts of {row} rows make up {item.rows}"
    return tuple(result)


def cut_spans(spans: Sequence[tuple[int, int]], first: int, rows: int) -> tuple[tuple[int, int], ...]:
    """Where rows [first, first + rows) of an item go, of `spans` that say it for all of them."""
    result, at = [], 0
    for offset, length in spans:
        low, high = max(first, at), min(first + rows, at + length)
        if low < high:
            result.append((offset + low - at, high - low))
        at += length
    return tuple(result)
