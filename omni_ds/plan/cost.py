"""Integer costs (FLOPs) of a replica's step: what assignments, windows and schedules are decided on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from omni_ds.plan.base import LLMWork
from omni_ds.plan.batch import MicroBatch
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.llm_meta import LLMMeta
from omni_ds.plan.sample import Item, SampleMeta

# Cost of a slice in thousandths of an equal part of its item: two all-to-alls a layer around attention.
GANG_PERMILLE = 1125


@lru_cache(maxsize=1 << 16)
def _item_flops(meta: EncoderMeta, segments: tuple[int, ...], rows: int) -> tuple[int, int]:
    return meta.forward_flops(segments, rows), meta.backward_flops(segments, rows)


class EncoderCost:
    """Forward and backward FLOPs of items; the backward of recomputed encoders repeats the forward."""

    def __init__(self, encoders: Sequence[EncoderMeta], recompute: bool = False):
        self.metas = {meta.name: meta for meta in encoders}
        self.recompute = recompute
        self.known: dict[tuple[str, tuple[int, ...], int], tuple[int, int]] = {}
        self.totals: dict[tuple[str, tuple[int, ...], int, int], int] = {}  # asked several times an item

    def both(self, item: Item) -> tuple[int, int]:
        key = (item.encoder, item.segments, item.rows * item.gang)
        found = self.known.get(key)
        if found is None:
            forward, backward = _item_flops(self.metas[item.encoder], *key[1:])
            if self.recompute and self.metas[item.encoder].tower_trainable:
                backward += forward
            found = self.known[key] = (forward, backward)
        if item.gang > 1:  # an equal part, and the exchange of heads
            share = 1000 * item.gang
            return found[0] * GANG_PERMILLE // share, found[1] * GANG_PERMILLE // share
        return found

    def total(self, item: Item) -> int:
        key = (item.encoder, item.segments, item.rows, item.gang)
        found = self.totals.get(key)
        if found is None:
            found = self.totals[key] = sum(self.both(item))
        return found

    def whole(self, items: Sequence[Item]) -> int:
        """Forward and backward of all items."""
        return sum([self.total(item) for item in items])


def encoder_work_per_token(
    encoders: Sequence[EncoderMeta], samples: Sequence[SampleMeta], recompute: bool = False
) -> int:
    """Encoder FLOPs, forward and backward, for each token that the LLM sees, on average over `samples`."""
    cost = EncoderCost(encoders, recompute)
    total = sum(cost.whole(sample.items) for sample in samples)
    return total // max(1, sum(sample.tokens for sample in samples))


def backward_factor(llm: LLMMeta, recompute: bool) -> int:
    """Backward FLOPs of a layer in units of its forward: input gradients, weight gradients, recomputation."""
    return 1 + llm.trainable + recompute


@dataclass(frozen=True)
class LLMCost:
    """Forward FLOPs of one decoder layer, and of the head, for each micro-batch of a replica."""

    layer: tuple[int, ...]
    head: tuple[int, ...]

    @classmethod
    def of(cls, llm: LLMMeta, micro_batches: Sequence[MicroBatch]) -> LLMCost:
        return cls(
            tuple(llm.layer_flops([s.tokens for s in mb.samples]) for mb in micro_batches),
            tuple(llm.head_flops(sum([s.target_tokens for s in mb.samples])) for mb in micro_batches),
        )

    def total(self, llm: LLMMeta) -> int:
        return llm.layers * sum(self.layer) + sum(self.head)


def llm_work(
    llm: LLMMeta,
    stages: Sequence[tuple[int, int]],
    costs: Sequence[LLMCost],
    *,
    recompute: bool,
    forward_only: bool,
    lanes: int = 1,
) -> LLMWork:
    """Costs of every stage and micro-batch on one rank, averaged over replicas: they run one common program.

    lanes: tensor x sequence ranks that share the work of a stage.

    The head counts on the last stage. An embedding look-up costs nothing.
    """
    count = len(costs) * lanes
    layer = [sum(cells) // count for cells in zip(*(cost.layer for cost in costs), strict=True)]
    head = [sum(cells) // count for cells in zip(*(cost.head for cost in costs), strict=True)]
    body_factor, head_factor = backward_factor(llm, recompute), 1 + llm.trainable
    forward, backward = [], []
    for s, (start, stop) in enumerate(stages):
        top = head if s == len(stages) - 1 else [0] * len(head)
        body = [(stop - start) * cost for cost in layer]
        forward.append(tuple(b + t for b, t in zip(body, top, strict=True)))
        backward.append(tuple(body_factor * b + head_factor * t for b, t in zip(body, top, strict=True)))
    return LLMWork(tuple(forward), None if forward_only else tuple(backward))
