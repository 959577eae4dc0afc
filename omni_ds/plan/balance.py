"""What balancing did to a step, in numbers: loads without it, long media, feature rows that have to move."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from omni_ds.plan.batch import MicroBatch
from omni_ds.plan.sample import SampleMeta
from omni_ds.plan.shards import even_bounds

if TYPE_CHECKING:
    from omni_ds.plan.plan import ReplicaPlan, StepPlan


def ratio(loads: Sequence[int]) -> float:
    """Largest over mean; 1 when there is nothing."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def as_given(
    llm: Sequence[int], media: Sequence[Sequence[int]], replicas: int, ranks: int
) -> tuple[float, float]:
    """Imbalance (encoder, LLM) of a step that is not balanced: samples in their order to replicas, as many
    each, and each replica's media, whole, to its `ranks` ranks in turn.

    llm[sample]: cost; media[sample][item]: cost.
    """
    of_replicas, of_ranks = [], []
    for start, stop in pairwise(even_bounds(len(llm), replicas)):
        of_replicas.append(sum(llm[start:stop]))
        costs = [cost for sample in media[start:stop] for cost in sample]
        of_ranks += [sum(costs[rank::ranks]) for rank in range(ranks)]
    return ratio(of_ranks), ratio(of_replicas)


def long_share(samples: Sequence[SampleMeta]) -> float:
    """Share of media that are encoded in parts or in slices."""
    media = long = 0
    for sample in samples:
        if sample.items:
            cut = {item.ordinal for item in sample.items if item.start or item.gang > 1}
            long += len(cut)
            media += len({item.ordinal for item in sample.items}) if cut else len(sample.items)
    return long / media if media else 0.0


def rows_to_move(step: StepPlan) -> int:
    """Feature rows that are made on another rank than the one that has to put them into the embedding, each
    counted once: the fewest that can travel, in either direction."""
    return sum(_rows_to_move(replica) for replica in step.replicas)


def feature_bytes_bound(step: StepPlan, row_width: int, element_size: int) -> int:
    """Bytes that features and, where encoders are trained, their gradients need to travel between ranks.

    row_width: numbers of a feature row (Plan.row_width)."""
    trains = not step.forward_only and step.replicas[0].encoders_trainable
    return rows_to_move(step) * row_width * element_size * (1 + trains)


def _rows_to_move(replica: ReplicaPlan) -> int:
    """Row by row, from where tokens belong, without the transfers that are to be judged by it."""
    wanted = {mb.index: _wanted(replica, mb) for mb in replica.micro_batches}
    moved = 0
    for window in replica.windows:
        for share in window.shares:
            for placed in share.items:
                owners = wanted[placed.micro_batch]
                for offset, length in placed.item.spans:
                    first = placed.position + offset
                    moved += sum([owners[token] != share.rank for token in range(first, first + length)])
    return moved


def _wanted(replica: ReplicaPlan, micro_batch: MicroBatch) -> dict[int, int]:
    """Token of a placeholder -> rank of the first stage that needs its row: of its sequence shard, the tensor
    rank whose turn it is when the shard's rows are dealt evenly in order."""
    tokens = sorted(
        start + offset + i
        for sample, start in zip(micro_batch.samples, micro_batch.cu_seqlens, strict=False)
        for item in sample.items
        for offset, length in item.spans
        for i in range(length)
    )
    found = {}
    for shard, (low, high) in enumerate(pairwise(replica.bounds(micro_batch))):
        inside = [token for token in tokens if low <= token < high]
        for lane, (start, stop) in enumerate(pairwise(even_bounds(len(inside), replica.tensor))):
            for token in inside[start:stop]:
                found[token] = replica.ranks[shard * replica.tensor + lane]
    return found
