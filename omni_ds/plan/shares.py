"""Encoder windows and shares: consecutive micro-batches encoded together, their items dealt to ranks by
cost."""

from __future__ import annotations

from collections.abc import Sequence

from omni_ds.plan.batch import MicroBatch
from omni_ds.plan.partition import karmarkar_karp
from omni_ds.plan.reshard import PlacedItem, Share, Window, order_share

FEW_RANKS = 32  # up to which looking through all ranks is faster than a heap


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
        parts = sum(rooms[w]) if rooms is not None else 0
        if not parts:
            each = total // ranks
            room = [each + c for c in carry]
        else:
            room = [part * total // parts + c for part, c in zip(rooms[w], carry, strict=True)]
        if ranks <= FEW_RANKS and (not exact or len(window) <= ranks):
            dealt = _largest_first(window, room)
            carry = room
        else:
            dealt = karmarkar_karp(window, ranks, capacities=room, exact=exact)
            carry = [r - sum([window[i] for i in part]) for r, part in zip(room, dealt, strict=True)]
        result.append(dealt)
    return result


def _largest_first(costs: Sequence[int], room: list[int]) -> tuple[tuple[int, ...], ...]:
    """Items, largest first, to the rank with most room, which `room` then lacks: what `karmarkar_karp` does
    with so few items or so many, without its heap."""
    parts: list[tuple[int, ...]] = [()] * len(room)
    for i in (0,) if len(costs) == 1 else sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        most = max(room)
        rank = room.index(most)
        room[rank] = most - costs[i]
        parts[rank] += (i,)
    return tuple([tuple(sorted(part)) if len(part) > 1 else part for part in parts])


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
    nothing = [Share(rank, ()) for rank in ranks]
    windows = []
    for w, window in enumerate(members):
        items = [placed for m in window for placed in placed_items(micro_batches[m])]
        shares = tuple(
            Share(empty.rank, order_share([items[i] for i in part], order)) if part else empty
            for empty, part in zip(nothing, parts[w], strict=True)
        )
        windows.append(Window(w, tuple(window), shares, passes[w]))
    return tuple(windows)
