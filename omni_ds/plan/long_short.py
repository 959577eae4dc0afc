"""Long media in parts, so that none of them holds up the other ranks.

A recording is cut between its windows, a video between its frames (or what of them one patch joins) and an
image between its tiles, which do not attend to each other. A part is an item of its own, of the same row and
ordinal, that starts at a later frame or tile; whoever encodes it takes its frames alone. Nothing is
computed twice and nothing is exchanged, so that the only reason to keep a clip whole is that it is small
beside what a rank encodes in a step.

An image attends to all of itself. One that would take a rank longer than a fair share of the step is cut into
slices for a gang of 2, 4 or 8 ranks, which encode it together with Ulysses sequence parallelism (gangs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from omni_ds.plan.cost import EncoderCost
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.sample import Item, SampleMeta

GRAIN = 32  # parts that make up what a rank encodes in a step, at least: a few for each of its windows


def split_recordings(
    samples: Sequence[SampleMeta], cost: EncoderCost, ranks: int, long_short: str | int
) -> tuple[SampleMeta, ...]:
    """Samples with long recordings, and images of many tiles, in parts.

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


def split_images(
    samples: Sequence[SampleMeta], cost: EncoderCost, ranks: int, long_short: str | int, most: int
) -> tuple[SampleMeta, ...]:
    """Samples with long images in slices for gangs of at most `most` ranks, a power of two.

    long_short: "off": none; a number: images of more tokens than that, into slices of at most as many;
    "auto": images that cost more than a fair share and a half, so that a slice costs at most a fair share of
    what each of the `ranks` encodes in the step.
    """
    sliceable = {name: meta for name, meta in cost.metas.items() if meta.sliceable}
    if long_short == "off" or most < 2 or not sliceable:
        return tuple(samples)
    fair = 0
    if long_short == "auto":
        costs = [sum(cost.both(item)) for sample in samples for item in sample.items]
        fair = sum(costs) // ranks
        if 2 * max(costs, default=0) <= 3 * fair:  # the usual case
            return tuple(samples)

    def slices(item: Item) -> tuple[Item, ...]:
        if item.encoder not in sliceable:
            return (item,)
        if long_short == "auto":
            size, fits = cost.total(item), fair
            long = 2 * size > 3 * fair
        else:
            size, fits = sum(item.segments), long_short
            long = size > fits
        gang = 1
        while long and gang < most and size > gang * fits:
            gang *= 2
        while gang > 1 and sliceable[item.encoder].slices(item.shape, gang) is None:
            gang //= 2
        return (item,) if gang == 1 else slice_item(sliceable[item.encoder], item, gang)

    def cut(sample: SampleMeta) -> SampleMeta:
        items = tuple(part for item in sample.items for part in slices(item))
        return sample if len(items) == len(sample.items) else replace(sample, items=items)

    return tuple([cut(sample) if sample.items else sample for sample in samples])


def slice_item(meta: EncoderMeta, item: Item, ranks: int) -> tuple[Item, ...]:
    """Slices of an image for a gang."""
    _, rows = meta.slices(item.shape, ranks)
    return tuple(
        replace(
            item,
            rows=stop - start,
            spans=cut_spans(item.spans, start, stop - start),
            gang=ranks,
            slice=index,
        )
        for index, (start, stop) in enumerate(pairwise(rows))
    )


def split_item(meta: EncoderMeta, item: Item, count: int) -> tuple[Item, ...]:
    """Parts of `count` segments each, a multiple of meta.segments_per_slice; the last one may be shorter, or
    longer by a segment that is too short for a part (meta.shortest_part)."""
    result, row, firsts = [], 0, list(range(0, len(item.segments), count))
    if len(firsts) > 1 and meta.part_of(item.shape, firsts[-1], count)[1][0] < meta.shortest_part:
        firsts.pop()
    for first, after in pairwise([*firsts, len(item.segments)]):
        start, shape = meta.part_of(item.shape, first, after - first)
        segments, rows = meta.measure(shape)
        assert segments == item.segments[first:after], "a part differs from its place in the whole"
        spans = cut_spans(item.spans, row, rows)
        result.append(
            replace(item, shape=shape, segments=segments, rows=rows, spans=spans, start=item.start + start)
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
