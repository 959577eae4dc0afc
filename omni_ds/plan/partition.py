"""Partitions of integer costs: stages of contiguous layers, bins of items with unequal room.

Everything is deterministic: ties go to the smaller index, so that every rank finds the same partition.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

LARGE_PROBLEM = 1 << 16
# Bins whose largest is at most this many thousandths above the mean are left alone; how many of the smallest
# bins are looked at for an exchange.
EVEN_PERMILLE, PARTNERS = 20, 8


def karmarkar_karp(
    costs: Sequence[int], bins: int, *, capacities: Sequence[int] | None = None, exact: bool = True
) -> tuple[tuple[int, ...], ...]:
    """Indices of `costs` in each bin, ascending, by the largest differencing method for `bins` parts.

    (Karmarkar and Karp 1982; k parts as in Korf 1998: the two partial partitions with the largest spread are
    merged, largest sum against smallest.) capacities: room of each bin in units of cost; what is equalised is
    load minus capacity, so a bin with more room gets more. Unused room of the roomiest bin is a head start
    of the others: they carry it as a first load.

    Differencing takes O(items x bins). When that is more than LARGE_PROBLEM, when there is at most one item
    for each bin, or with exact=False, items are dealt largest first to the least loaded bin instead
    (longest processing time), in O(items x log bins).
    """
    assert bins >= 1
    assert capacities is None or len(capacities) == bins
    if bins == 1:
        return (tuple(range(len(costs))),)
    head_start = [0] * bins
    if capacities is not None:
        top = max(capacities)
        head_start = [top - room for room in capacities]
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)  # stable: ties by index
    if not any(head_start) and len(order) <= bins:
        # One each. (Differencing ends here too, after a merge for every item.)
        return tuple((order[b],) if b < len(order) else () for b in range(bins))
    if not exact or len(order) <= bins or len(order) * bins > LARGE_PROBLEM:
        return _largest_first(order, costs, head_start)

    # A partial partition: slots (load, members) by falling load; absent slots are empty and weigh nothing.
    # Members are index tuples; -1 - b marks bin b's head start and so names the bin a slot belongs to.
    heap: list[tuple[int, int, list[tuple[int, tuple[int, ...]]]]] = []
    serial = 0

    def push(slots: list[tuple[int, tuple[int, ...]]]) -> None:
        nonlocal serial
        spread = slots[0][0] - (slots[-1][0] if len(slots) == bins else 0)
        heapq.heappush(heap, (-spread, serial, slots))
        serial += 1

    if any(head_start):
        push(sorted(((load, (-1 - b,)) for b, load in enumerate(head_start)), key=lambda s: (-s[0], s[1][0])))
        rest = order
    else:
        # The largest `bins` items never share a bin when differencing starts: the first merges, done at once.
        push([(costs[i], (i,)) for i in order[:bins]])
        rest = order[bins:]
    for i in rest:
        push([(costs[i], (i,))])
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        push(_merge(first, second, bins))
    slots = heap[0][2]

    parts: list[tuple[int, ...]] = [()] * bins
    if any(head_start):
        for _, members in slots:
            owner = next(-1 - m for m in members if m < 0)
            parts[owner] = tuple(sorted(m for m in members if m >= 0))
    else:
        ordered = sorted((tuple(sorted(members)) for _, members in slots), key=lambda m: m[:1])
        parts[: len(ordered)] = ordered
    return tuple(parts)


def _largest_first(
    order: Sequence[int], costs: Sequence[int], head_start: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    # A load with the bin in the low bits: as (load, bin), but compared faster.
    bits = len(head_start).bit_length()
    heap = [load << bits | b for b, load in enumerate(head_start)]
    heapq.heapify(heap)
    mask, replace = (1 << bits) - 1, heapq.heapreplace
    members: list[list[int]] = [[] for _ in head_start]
    for i in order:
        least = heap[0]
        replace(heap, least + (costs[i] << bits))
        members[least & mask].append(i)
    return tuple([tuple(sorted(part)) for part in members])


def _merge(
    first: list[tuple[int, tuple[int, ...]]], second: list[tuple[int, tuple[int, ...]]], bins: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Largest of `second` onto smallest of `first`: slots that both have are paired from opposite ends."""
    overlap = len(first) + len(second) - bins
    if overlap <= 0:
        merged = first + second
    else:
        kept, shared = first[: len(first) - overlap], first[len(first) - overlap :]
        free, paired = second[: len(second) - overlap], second[len(second) - overlap :]
        # `free` of second sits in empty slots of first (its largest against nothing); the rest is paired,
        # the smallest of first with the largest that is left of second.
        merged = kept + free
        for (load, members), (more, others) in zip(shared, reversed(paired), strict=True):
            merged.append((load + more, members + others))
    merged.sort(key=lambda slot: (-slot[0], slot[1][0]))
    return merged


def deal(
    costs: Sequence[int], tokens: Sequence[int], bins: int, budget: int
) -> tuple[tuple[int, ...], ...] | None:
    """Bins of balanced cost with at most `budget` tokens each, or None when this search finds none.

    Karmarkar-Karp first; where it breaks the budget, the items are dealt one by one (largest cost first, to
    the cheapest bin that still has room); where that fails too, first-fit decreasing on tokens decides. Then
    the dearest bins exchange items with the cheapest.
    """
    parts = karmarkar_karp(costs, bins)
    if max([sum([tokens[i] for i in part]) for part in parts]) > budget:
        by_cost = sorted(range(len(costs)), key=lambda i: (-costs[i], -tokens[i], i))
        by_tokens = sorted(range(len(costs)), key=lambda i: (-tokens[i], -costs[i], i))
        parts = _greedy(by_cost, costs, tokens, bins, budget)
        parts = parts or _greedy(by_tokens, costs, tokens, bins, budget)
    return parts and exchange(parts, costs, tokens, budget)


def exchange(
    parts: Sequence[tuple[int, ...]], costs: Sequence[int], tokens: Sequence[int], budget: int
) -> tuple[tuple[int, ...], ...]:
    """Bins after exchanges of one item for one or none between the dearest bin and one of the cheapest, each
    time the one that leaves the dearer of the two cheapest, until the bins are even or no exchange helps.

    Differencing and greedy deals put the largest items of two sizes (a few long samples among short ones)
    together as they come; which of them fit together is found here.
    """
    loads = [sum([costs[i] for i in part]) for part in parts]
    enough = sum(loads) * (1000 + EVEN_PERMILLE) // (1000 * len(loads))
    if max(loads) <= enough:
        return tuple(parts)
    bins = [sorted([(costs[i], i) for i in part]) for part in parts]
    used = [sum([tokens[i] for i in part]) for part in parts]
    changed = set()
    for _ in range(4 * len(bins)):
        high = loads.index(max(loads))
        if loads[high] <= enough:
            break
        best, found = loads[high], None
        for load, low in heapq.nsmallest(PARTNERS, [(load, b) for b, load in enumerate(loads)]):
            gap = loads[high] - load
            for cost, i in bins[high]:
                near = bisect_left(bins[low], (cost - gap // 2, 0))
                for other, j in (*bins[low][max(0, near - 1) : near + 1], (0, -1)):
                    top = max(loads[high] - cost + other, load + cost - other)
                    if top < best:
                        more = tokens[i] - (tokens[j] if j >= 0 else 0)
                        if used[low] + more <= budget and used[high] - more <= budget:
                            best, found = top, (low, (cost, i), (other, j), more)
        if found is None:
            break
        low, given, taken, more = found
        bins[high].remove(given)
        insort(bins[low], given)
        if taken[1] >= 0:
            bins[low].remove(taken)
            insort(bins[high], taken)
        moved = given[0] - taken[0]
        loads[high], loads[low] = loads[high] - moved, loads[low] + moved
        used[high], used[low] = used[high] - more, used[low] + more
        changed |= {high, low}
    return tuple(
        tuple(sorted([i for _, i in bins[b]])) if b in changed else part for b, part in enumerate(parts)
    )


def _greedy(
    order: Sequence[int], costs: Sequence[int], tokens: Sequence[int], bins: int, budget: int
) -> tuple[tuple[int, ...], ...] | None:
    members: list[list[int]] = [[] for _ in range(bins)]
    used = [0] * bins
    heap = [(0, b) for b in range(bins)]
    for i in order:
        passed = []
        while heap and used[heap[0][1]] + tokens[i] > budget:
            passed.append(heapq.heappop(heap))
        if not heap:
            return None
        load, b = heap[0]
        heapq.heapreplace(heap, (load + costs[i], b))
        used[b] += tokens[i]
        members[b].append(i)
        for entry in passed:
            heapq.heappush(heap, entry)
    return tuple(sorted((tuple(sorted(part)) for part in members), key=lambda m: (not m, m[:1])))


def cut_stages(layer: int, layers: int, first: int, last: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Ranges [start, stop) of `layers` equal layers, minimising the dearest stage.

    layer: cost of one; first, last: cost added to the first and last stage (embedding; norm and head).
    Every stage gets at least one layer. With equal layers a cut is a count per stage, and dynamic
    programming over counts finds the smallest maximum exactly; among cuts with that maximum smaller sums of
    squares are preferred, so that the other stages are even too.
    """
    assert 1 <= stages <= layers
    # best[n]: (maximum, sum of squares, counts) for stages 0..s holding n layers
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for s in range(stages):
        extra = first * (s == 0) + last * (s == stages - 1)
        grown: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for n, (top, squares, counts) in best.items():
            for count in range(1, layers - n - (stages - 1 - s) + 1):
                if s == stages - 1 and n + count != layers:
                    continue
                load = count * layer + extra
                candidate = (max(top, load), squares + load * load, (*counts, count))
                if n + count not in grown or candidate < grown[n + count]:
                    grown[n + count] = candidate
        best = grown
    counts = best[layers][2]
    ranges, start = [], 0
    for count in counts:
        ranges.append((start, start + count))
        start += count
    return tuple(ranges)
