"""Who encodes the slices of long items: neighbours of one stage, which stand at the same point of the
schedule.

A gang of g ranks encodes an item of g slices together: an aligned block of g neighbours among the ranks of a
stage, ordered data, sequence, tensor as the mesh orders them, inside one reorder group, with a rank of the
item's replica among them. It may reach over replicas: then a rank encodes a slice for another one, as its
guest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omni_ds.plan.graph import ScheduleError
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.shares import Dealt, deal_windows

if TYPE_CHECKING:
    from omni_ds.plan.plan import ReplicaPlan, StepPlan

Table = Sequence[Sequence[Sequence[int]]]  # [replica][window][item]
Guest = tuple[int, int]  # global rank, index of the item among those of the window


def stage_blocks(mesh: Mesh, size: int, replicas: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """[reorder group of `replicas` replicas] -> aligned blocks of `size` ranks of one stage, all stages."""
    width = mesh.data * mesh.lanes
    result = []
    for first in range(0, mesh.data, replicas):
        low, high = first * mesh.lanes, (first + replicas) * mesh.lanes
        starts = range(-(-low // size) * size, high - size + 1, size)
        result.append(
            tuple(
                tuple(range(p * width + start, p * width + start + size))
                for p in range(mesh.pipe)
                for start in starts
            )
        )
    return tuple(result)


def guests_of(mesh: Mesh, largest: int, replicas: int, data: int) -> tuple[int, ...]:
    """Ranks of other replicas that may encode slices for replica `data`, in gangs of up to `largest`."""
    own, found, size = set(mesh.encoder_groups()[data]), set(), 2
    while size <= largest:
        found.update(*blocks_for(mesh, size, replicas, data))
        size *= 2
    return tuple(sorted(found - own))


def blocks_for(mesh: Mesh, size: int, replicas: int, data: int) -> tuple[tuple[int, ...], ...]:
    """Blocks that may encode slices for replica `data`: those it has ranks in; where the replicas of a
    reorder group do not divide into blocks and it is left over, all of the group."""
    own, blocks = set(mesh.encoder_groups()[data]), stage_blocks(mesh, size, replicas)[data // replicas]
    return tuple(block for block in blocks if own & set(block)) or blocks


def largest_gang(mesh: Mesh, replicas: int, most: int) -> int:
    """The largest power of two of at most `most` ranks for which there is a block in each reorder group."""
    size = 1
    while 2 * size <= most and all(stage_blocks(mesh, 2 * size, replicas)):
        size *= 2
    return size


@dataclass
class Deal:
    """parts[replica][window][position]: items of the replica's own ranks; guests[replica][window]: its
    slices on ranks of others."""

    parts: list[tuple[Dealt, ...]]
    guests: list[tuple[tuple[Guest, ...], ...]]


@dataclass
class _Placed:
    """Slices of one replica: by window, position -> items; guests; cost of slices on its own ranks."""

    own: list[dict[int, list[int]]] = field(default_factory=list)
    guests: list[list[Guest]] = field(default_factory=list)
    loads: list[list[int]] = field(default_factory=list)


def deal_with_gangs(
    mesh: Mesh,
    replicas: int,
    costs: Table,
    gangs: Table,
    rooms: Sequence[Sequence[int]] | None,
    *,
    exact: bool,
) -> Deal:
    """Slices to gangs first, dearest item first, each to the block that has least to do so far; then the
    other items around them.

    gangs: number of slices of the item that an entry is one of, 1 for whole items; slices of an item follow
    each other. replicas: of a reorder group. rooms, exact: as in deal_windows.
    """
    placed = _place(mesh, replicas, costs, gangs)
    deal = Deal([], [])
    for d, mine in enumerate(placed):
        whole = [[i for i, g in enumerate(window) if g == 1] for window in gangs[d]]
        dealt = deal_windows(
            [[costs[d][w][i] for i in window] for w, window in enumerate(whole)],
            mesh.pipe * mesh.lanes,
            rooms,
            exact=exact,
            loads=mine.loads,
        )
        parts = []
        for window, ranks, own in zip(whole, dealt, mine.own, strict=True):
            parts.append(
                tuple(
                    tuple([window[i] for i in part] + own.get(position, []))
                    for position, part in enumerate(ranks)
                )
            )
        deal.parts.append(tuple(parts))
        deal.guests.append(tuple(tuple(guests) for guests in mine.guests))
    return deal


def _place(mesh: Mesh, replicas: int, costs: Table, gangs: Table) -> list[_Placed]:
    ranks, windows = mesh.pipe * mesh.lanes, len(costs[0])
    placed = [
        _Placed(
            [{} for _ in range(windows)],
            [[] for _ in range(windows)],
            [[0] * ranks for _ in range(windows)],
        )
        for _ in costs
    ]
    home = {rank: (d, p) for d, group in enumerate(mesh.encoder_groups()) for p, rank in enumerate(group)}
    blocks: dict[tuple[int, int], tuple] = {}
    load = [0] * mesh.world_size
    for w in range(windows):
        for _, d, first, size in _items_in_slices(costs, gangs, w):
            if (size, d) not in blocks:
                blocks[size, d] = blocks_for(mesh, size, replicas, d)
            block = min(blocks[size, d], key=lambda ranks: (max(load[rank] for rank in ranks), ranks[0]))
            for index, rank in enumerate(block, first):
                owner, position = home[rank]
                load[rank] += costs[d][w][index]
                placed[owner].loads[w][position] += costs[d][w][index]
                if owner == d:
                    placed[d].own[w].setdefault(position, []).append(index)
                else:
                    placed[d].guests[w].append((rank, index))
    return placed


def _items_in_slices(costs: Table, gangs: Table, window: int) -> list[tuple[int, int, int, int]]:
    """(-cost, replica, index of the first slice, slices) of a window, dearest first."""
    found = []
    for d, replica in enumerate(gangs):
        sizes, i = replica[window], 0
        while i < len(sizes):
            if sizes[i] > 1:
                found.append((-sum(costs[d][window][i : i + sizes[i]]), d, i, sizes[i]))
            i += sizes[i]
    return sorted(found)


def hosted_slices(
    mesh: Mesh, guests: Sequence[Sequence[Sequence[Guest]]], window: int, data: int
) -> dict[int, list[tuple[int, int]]]:
    """Position of a rank of replica `data` -> (replica, item) of the slices it encodes for others."""
    found: dict[int, list[tuple[int, int]]] = {}
    for other, windows in enumerate(guests):
        for rank, item in windows[window]:
            coords = mesh.coords(rank)
            if coords.data == data:
                lane = coords.sequence * mesh.tensor + coords.tensor
                found.setdefault(coords.pipe * mesh.lanes + lane, []).append((other, item))
    return found


def window_gangs(step_plan: StepPlan, rank: int) -> dict[int, tuple[int, ...]]:
    """Window -> the ranks that encode slices together with `rank` in it. Of several gangs the largest, which
    holds the smaller ones."""
    mesh, found = step_plan.mesh, {}
    for window in range(len(step_plan.replica_of(rank).windows)):
        shares = step_plan.shares(rank, window)
        size = max((placed.item.gang for _, share in shares for placed in share.slices), default=1)
        if size > 1:
            width = mesh.data * mesh.lanes
            first = rank - rank % width % size
            found[window] = tuple(range(first, first + size))
    return found


def check_gangs(replica: ReplicaPlan) -> None:
    """ScheduleError unless the slices of an item are on neighbours, in order, and all there."""
    for window in replica.windows:
        ranks: dict[tuple, dict[int, int]] = {}
        for share in window.shares:
            for placed in share.slices:
                item = placed.item
                key = (item.row, item.ordinal, placed.micro_batch, placed.position, item.gang)
                ranks.setdefault(key, {})[item.slice] = share.rank
        for (row, ordinal, *_, gang), by_slice in ranks.items():
            first = by_slice.get(0, -1)
            if by_slice != {i: first + i for i in range(gang)}:
                raise ScheduleError(
                    f"the {gang} slices of item {ordinal} of row {row} are on ranks {by_slice} in window "
                    f"{window.index}, not on neighbours in order"
                )
