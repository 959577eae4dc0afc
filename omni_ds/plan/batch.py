"""Micro-batches: whole samples packed under a token budget, dealt to (replica, micro-batch) bins by cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from omni_ds.plan.sample import SampleMeta


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
