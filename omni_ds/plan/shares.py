"""Encoder windows and shares: consecutive micro-batches encoded together, their items dealt to ranks by
cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omni_ds.plan.batch import MicroBatch
from omni_ds.plan.partition import karmarkar_karp
from omni_ds.plan.reshard import PlacedItem, Share, Window, order_share
from omni_ds.plan.sample import Item


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


def share_window(
    index: int,
    members: Sequence[int],
    items: Sequence[PlacedItem],
    ranks: Sequence[int],
    cost: Callable[[Item], int],
    encoder_order: dict[str, int],
    *,
    capacities: Sequence[int] | None = None,
    passes: tuple[str, ...] = (),
) -> Window:
    """Deal the items of a window to the ranks of the encoder group; load minus capacity is evened out."""
    parts = (
        karmarkar_karp([cost(placed.item) for placed in items], len(ranks), capacities=capacities)
        if items
        else ((),) * len(ranks)
    )
    shares = tuple(
        Share(rank, order_share([items[i] for i in part], encoder_order))
        for rank, part in zip(ranks, parts, strict=True)
    )
    return Window(index, tuple(members), shares, passes)


def share_first_stage(
    index: int,
    members: Sequence[int],
    items: Sequence[PlacedItem],
    ranks: Sequence[int],
    encoder_order: dict[str, int],
    passes: tuple[str, ...] = (),
) -> Window:
    """Everything on the first rank, the one that embeds."""
    shares = tuple(
        Share(rank, order_share(items, encoder_order) if rank == ranks[0] else ()) for rank in ranks
    )
    return Window(index, tuple(members), shares, passes)
