"""Encoder windows and shares: consecutive micro-batches encoded together, their items dealt to ranks by
cost."""

from __future__ import annotations

from collections.abc import Sequence

from omni_ds.plan.batch import MicroBatch
from omni_ds.plan.partition import karmarkar_karp
from omni_ds.plan.reshard import PlacedItem, Share, Window, order_share


def cut_windows(micro_batches: int, size: int) -> tuple[tuple[int, ...], ...]:
    """Windows of `size` consecutive micro-batches; the last one may be smaller."""
    return tuple(
        tuple(range(start, min(micro_batches, start + size))) for start in range(0, micro_batches, size)
    )


def placed_items(micro_batch: MicroBatch) -> tuple[PlacedItem, ...]:
    """Items of a micro-batch with the packed offsets of their samples."""
    return tuple(
        PlacedItem(item, micro_batch.index, position)
        for sample, position in zip(micro_batch.samples, micro_batch.cu_seqlens, strict=False)
        for item in sample.items
    )


def deal_windows(
    costs: Sequence[Sequence[int]],
    ranks: int,
    rooms: Sequence[Sequence[int]] | None = None,
    *,
    exact: bool = True,
) -> list[tuple[tuple[int, ...], ...]]:
    """Indices of each window's items for each rank: [window][rank].

    costs[w]: of its items. rooms[w]: how the ranks should divide the window, in any unit; None for evenly.
    exact: as in karmarkar_karp. What a rank got too much or too little of is carried over to the next
    window: with few or very unequal items single windows cannot be even, and ranks run ahead of each other
    by several windows.
    """
    carry = [0] * ranks
    result = []
    for w, window in enumerate(costs):
        total = sum(window)
        if not total:
            result.append(((),) * ranks)
            continue
        if rooms is None or not sum(rooms[w]):
            room = [total // ranks + c for c in carry]
        else:
            parts = sum(rooms[w])
            room = [part * total // parts + c for part, c in zip(rooms[w], carry, strict=True)]
        dealt = karmarkar_karp(window, ranks, capacities=room, exact=exact)
        carry = [r - sum(window[i] for i in part) for r, part in zip(room, dealt, strict=True)]
        result.append(dealt)
    return result


def build_windows(
    micro_batches: Sequence[MicroBatch],
    members: Sequence[Sequence[int]],
    parts: Sequence[Sequence[Sequence[int]]],
    passes: Sequence[tuple[str, ...]],
    ranks: Sequence[int],
    encoders: Sequence[str],
) -> tuple[Window, ...]:
    """Windows with shares of placed items. parts[w][r]: which of the window's items rank ranks[r] encodes,
    counted in the order micro-batch, sample, ordinal."""
    order = {name: i for i, name in enumerate(encoders)}
    windows = []
    for w, window in enumerate(members):
        items = [placed for m in window for placed in placed_items(micro_batches[m])]
        shares = tuple(
            Share(rank, order_share([items[i] for i in part], order) if part else ())
            for rank, part in zip(ranks, parts[w], strict=True)
        )
        windows.append(Window(w, tuple(window), shares, passes[w]))
    return tuple(windows)
