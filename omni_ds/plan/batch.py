"""Micro-batches: whole samples packed under a token budget, dealt to (replica, micro-batch) bins by cost."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from omni_ds.errors import UserError
from omni_ds.plan.partition import deal
from omni_ds.plan.sample import SampleMeta
from omni_ds.plan.shards import even_bounds


@dataclass(frozen=True)
class MicroBatch:
    """Samples in packing order; without samples it is an empty micro-batch, which is ordinary."""

    index: int
    samples: tuple[SampleMeta, ...] = ()

    @cached_property
    def tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples)

    @cached_property
    def target_tokens(self) -> int:
        return sum(sample.target_tokens for sample in self.samples)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sample.tokens for sample in self.samples)

    @cached_property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Start of each sample in the packed sequence, and its end: (0, n0, n0 + n1, ...)."""
        return tuple(accumulate(self.lengths, initial=0))

    @cached_property
    def max_seqlen(self) -> int:
        return max(self.lengths, default=0)


def assign(
    samples: Sequence[SampleMeta],
    replicas: int,
    budget: int,
    micro_batches: int | None,
    fill: int,
    cost: Callable[[SampleMeta], int],
    media_cost: Callable[[SampleMeta], int] = lambda sample: 0,
    *,
    balance: bool = True,
    groups: int = 1,
) -> tuple[tuple[MicroBatch, ...], ...]:
    """The micro-batches of each replica; the same number M on all, some possibly empty.

    groups: of neighbouring replicas, which divide the samples in order and keep their own.

    M is `micro_batches` if given, otherwise the smallest that fits `budget` tokens a micro-batch and is at
    least `fill` (as far as there are samples). balance: bins of even `cost` from all samples; otherwise
    samples keep their order. Every sample fits the budget (checked when the data were indexed).

    Raises UserError when `micro_batches` is given and no packing into that many was found.
    """
    one_group = _as_given if not balance else _balanced

    def lists(costs, media, tokens, replicas, count, budget):
        if groups == 1:
            return one_group(costs, media, tokens, replicas, count, budget)
        rows = []
        for start, stop in pairwise(even_bounds(len(costs), groups)):
            mine = (costs[start:stop], media[start:stop], tokens[start:stop])
            found = one_group(*mine, replicas // groups, count, budget)
            if found is None:
                return None
            rows += [[tuple([start + i for i in bin_]) for bin_ in row] for row in found]
        return rows

    samples = tuple(samples)
    costs, tokens = [cost(s) for s in samples], [s.tokens for s in samples]
    media = [media_cost(s) for s in samples]
    if micro_batches is not None:
        found = lists(costs, media, tokens, replicas, micro_batches, budget)
        if found is None:
            raise UserError(
                f"gradient_accumulation_steps {micro_batches}: {len(samples)} samples with {sum(tokens)} "
                f"tokens do not fit {replicas} x {micro_batches} micro-batches of "
                f"max_tokens_per_micro_batch {budget}; raise either of the two, "
                "or leave gradient_accumulation_steps out"
            )
    else:
        count = max(1, min(fill, -(-len(samples) // replicas)), -(-sum(tokens) // (budget * replicas)))
        while (found := lists(costs, media, tokens, replicas, count, budget)) is None:
            assert count <= len(samples), "a sample is longer than the token budget"
            count += 1
    return tuple(
        tuple([MicroBatch(m, tuple([samples[i] for i in members])) for m, members in enumerate(bins)])
        for bins in found
    )


def _balanced(
    costs: Sequence[int], media: Sequence[int], tokens: Sequence[int], replicas: int, count: int, budget: int
) -> list[list[tuple[int, ...]]] | None:
    bins = deal(costs, tokens, replicas * count, budget)
    if bins is None:
        return None
    # Replicas take `count` bins each, heaviest first to the least loaded: encoder work counts here too.
    both = [x + y for x, y in zip(costs, media, strict=True)]
    weights = [sum([both[i] for i in bin_]) for bin_ in bins]
    rows: list[list[tuple[int, ...]]] = [[] for _ in range(replicas)]
    open_rows = [(0, r) for r in range(replicas)]
    for b in sorted(range(len(bins)), key=weights.__getitem__, reverse=True):  # stable: ties by index
        load, r = heapq.heappop(open_rows)
        rows[r].append(bins[b])
        if len(rows[r]) < count:
            heapq.heappush(open_rows, (load + weights[b], r))
    return [_order(row, costs, media) for row in rows]


def _order(row: list[tuple[int, ...]], costs: Sequence[int], media: Sequence[int]) -> list[tuple[int, ...]]:
    order = light_ends([sum([media[i] for i in b]) for b in row], [sum([costs[i] for i in b]) for b in row])
    return [row[b] for b in order]


def light_ends(encoding: Sequence[int], costs: Sequence[int]) -> list[int]:
    """An order of micro-batches with little encoder work at both ends: the first forward and the last
    backward of the step wait for it. Ties: dearer ones outside, then by index."""
    ranked = [b for *_, b in sorted(zip(encoding, [-c for c in costs], range(len(costs)), strict=True))]
    return ranked[0::2] + ranked[1::2][::-1]


def _as_given(
    costs: Sequence[int], media: Sequence[int], tokens: Sequence[int], replicas: int, count: int, budget: int
) -> list[list[tuple[int, ...]]] | None:
    """Consecutive samples to each replica, and consecutive runs of them to its micro-batches."""
    rows, total = [], len(costs)
    for r in range(replicas):
        mine = range(r * total // replicas, (r + 1) * total // replicas)
        bins: list[list[int]] = [[]]
        most = -(-len(mine) // count)
        for i in mine:
            if len(bins[-1]) >= most or sum(tokens[j] for j in bins[-1]) + tokens[i] > budget:
                bins.append([])
            bins[-1].append(i)
        if len(bins) > count:
            return None
        rows.append([tuple(b) for b in bins] + [()] * (count - len(bins)))
    return rows
