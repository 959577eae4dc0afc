"""What attention may see: the mask of a layer, and the packing it applies to.

Both travel to the attention back end in the place of HF's ``attention_mask`` argument, which every HF layer
hands on untouched (SigLIP's attention drops extra keyword arguments).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from models.transfer import on_device
from omni_ds.parallel.ulysses import Ulysses


@dataclass(frozen=True)
class MaskSpec:
    """Which keys a query sees inside its own segment, and how scores are bounded.

    - causal: keys up to the query's own position.
    - window: of those, the last ``window`` (the query itself counts, as in HF's sliding window); None: all.
    - spans: (offset, length) in packed tokens, each within a segment, whose tokens also see those that follow
      them in the span, whatever ``causal`` says; None: no such spans.
    - softcap: scores become ``softcap * tanh(scores / softcap)``; None: unbounded.
    """

    causal: bool = False
    window: int | None = None
    spans: tuple[tuple[int, int], ...] | None = None
    softcap: float | None = None

    @property
    def features(self) -> frozenset[str]:
        """Names of what a back end must be able to do."""
        used = {"causal": self.causal, "window": self.window, "spans": self.spans, "softcap": self.softcap}
        return frozenset(name for name, value in used.items() if value not in (None, False))


@dataclass(frozen=True)
class PaddedGroup:
    """Segments computed as one batch. ``rows``: [n, longest] packed positions, a short segment repeats its
    last one.

    ``lengths``: their true lengths; ``uniform`` when none is padded.
    """

    rows: Tensor
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        return self.rows.shape[1]

    @property
    def uniform(self) -> bool:
        return min(self.lengths) == self.longest


def bucket_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of runs to compute as one padded batch each, longest first, stable.

    A batch takes runs that are at most a quarter (or 16 tokens) shorter than its longest: on short runs the
    padding costs less than a kernel call for each.
    """
    buckets: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[buckets[-1][0]] if buckets else 0
        if not buckets or longest - lengths[i] > max(16, longest // 4):
            buckets.append([])
        buckets[-1].append(i)
    return buckets


@dataclass(frozen=True)
class Packing:
    """Segments of one packed sequence of T tokens, with the mask inside each.

    ``cu_seqlens``: [n + 1] int32 on the device; ``segments``: the n lengths on the host. With ``ulysses`` the
    T tokens are cut over several ranks, and attention redistributes them.
    """

    cu_seqlens: Tensor
    segments: tuple[int, ...]
    mask: MaskSpec = MaskSpec()
    ulysses: Ulysses | None = None
    _shared: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, segments: Sequence[int], device: torch.device | str, mask: MaskSpec = MaskSpec()) -> Packing:
        offsets = torch.tensor([0, *segments], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(on_device(offsets, device), tuple(segments), mask)

    def with_mask(self, mask: MaskSpec) -> Packing:
        """The same segments under another mask; what was derived from the segments is shared."""
        return replace(self, mask=mask)

    @property
    def max_seqlen(self) -> int:
        return max(self.segments, default=0)

    @property
    def groups(self) -> tuple[tuple[PaddedGroup, ...], Tensor | None]:
        """Batches of segments of like length, and the index [T] that puts their valid rows back in packed
        order.

        The index is None when one unpadded batch covers everything in order. Made once for all layers and
        masks.
        """
        if "groups" not in self._shared:
            self._shared["groups"] = self._make_groups()
        return self._shared["groups"]

    def _make_groups(self) -> tuple[tuple[PaddedGroup, ...], Tensor | None]:
        device, segments = self.cu_seqlens.device, self.segments
        if segments and min(segments) == max(segments):
            rows = torch.arange(sum(segments), device=device).view(len(segments), segments[0])
            return (PaddedGroup(rows, segments),), None
        starts = list(accumulate(segments, initial=0))
        groups, inverse, done = [], torch.empty(starts[-1], dtype=torch.int64), 0
        for bucket in bucket_lengths(segments):
            lengths = tuple(segments[i] for i in bucket)
            first = torch.tensor([starts[i] for i in bucket]).unsqueeze(1)
            last = torch.tensor(lengths).unsqueeze(1) - 1
            steps = torch.arange(lengths[0]).unsqueeze(0)
            rows = first + torch.minimum(steps, last)
            valid = steps <= last
            inverse[rows[valid]] = done + torch.arange(rows.numel()).view_as(rows)[valid]
            done += rows.numel()
            groups.append(PaddedGroup(on_device(rows, device), lengths))
        return tuple(groups), on_device(inverse, device)
