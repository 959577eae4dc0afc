"""Attention in spans: runs of packed tokens that see each other in both directions, images in Gemma3.

A query inside a span sees what it sees without the span, and what follows it in the span: with a window, keys
behind the window stay hidden although they are of the same span. HF composes the masks of Gemma3 so
(``create_masks_for_vision_model``).

Kernels that know causal attention and windows alone compute it in two calls: all tokens as if there were no
spans, then the queries of the spans again, each span against the keys up to its own end, where nothing has to
be hidden but what a window leaves behind.

Shapes: T packed tokens, A query heads, K key heads, D head size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from models.masks import Packing, PaddedGroup


@dataclass(frozen=True)
class Call:
    """What a kernel for packed sequences is told beside its tensors.

    Sequence i of the queries attends to sequence i of the keys, the last query standing at the last key.
    ``window``: (left, right), how many keys before and after its own a query sees; -1 for all.
    """

    cu_queries: Tensor
    cu_keys: Tensor
    longest_query: int
    longest_key: int
    window: tuple[int, int]

    @property
    def causal(self) -> bool:
        return self.window[1] == 0


Kernel = Callable[[Tensor, Tensor, Tensor, Call], Tensor]
"""(query [Q, A, D], key [P, K, D], value [P, K, D], call) -> [Q, A, D]."""


def attend(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
    """Query [T, A, D], key and value [T, K, D] -> [T, A, D] under the packing's mask, by one call or two."""
    mask, longest, cuts = packing.mask, packing.max_seqlen, packing.cu_seqlens
    window = (-1 if mask.window is None else mask.window - 1, 0 if mask.causal else -1)
    out = kernel(query, key, value, Call(cuts, cuts, longest, longest, window))
    if not mask.spans:
        return out
    queries, keys, call = _second_call(packing)
    inside = kernel(
        *(x.index_select(0, at) for x, at in ((query, queries), (key, keys), (value, keys))), call
    )
    return out.index_copy(0, queries, inside)


def _second_call(packing: Packing) -> tuple[Tensor, Tensor, Call]:
    """(packed positions of the queries in spans, of the keys each span needs, the call); made once for all
    layers of a mask."""
    shared, mask = packing._shared, packing.mask
    kept = ("spans", mask)
    if kept not in shared:
        device = packing.cu_seqlens.device
        starts = list(accumulate(packing.segments, initial=0))
        ranges = []
        for first, length in mask.spans:
            start = starts[bisect_right(starts, first) - 1]
            if mask.window is not None:
                start = max(start, first - mask.window + 1)
            ranges.append((start, first, first + length))
        queries = torch.cat([torch.arange(first, stop) for _, first, stop in ranges]).to(device)
        keys = torch.cat([torch.arange(start, stop) for start, _, stop in ranges]).to(device)
        lengths = [(stop - first, stop - start) for start, first, stop in ranges]
        cuts = (
            torch.tensor([0, *accumulate(each)], dtype=torch.int32).to(device)
            for each in zip(*lengths, strict=True)
        )
        longest = (max(each) for each in zip(*lengths, strict=True))
        longest = tuple(longest)
        window = (-1, -1) if mask.window is None else (mask.window - 1, longest[0])
        shared[kept] = queries, keys, Call(*cuts, *longest, window)
    return shared[kept]


def visible(packing: Packing, group: PaddedGroup) -> Tensor:
    """Boolean mask [n, 1, S, S] of a batch of causal segments with spans: True where a query sees a key; made
    once for all layers of a mask. What stands for padding is behind all queries."""
    shared, mask = packing._shared, packing.mask
    kept = ("visible", mask, id(group))
    if kept not in shared:
        device = packing.cu_seqlens.device
        span_of = torch.full((sum(packing.segments),), -1)
        for number, (first, length) in enumerate(mask.spans):
            span_of[first : first + length] = number
        steps = torch.arange(group.longest, device=device)
        spans = span_of.to(device)[group.rows]
        # a short segment repeats its last token, which may be of a span
        spans = spans.masked_fill(steps >= torch.tensor(group.lengths, device=device).unsqueeze(1), -1)
        distance = steps.unsqueeze(1) - steps
        seen = (distance >= 0) | ((spans.unsqueeze(2) == spans.unsqueeze(1)) & (spans >= 0).unsqueeze(2))
        if mask.window is not None:
            seen &= distance < mask.window
        shared[kept] = seen.unsqueeze(1)
    return shared[kept]
