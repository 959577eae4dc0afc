"""Attention inside long segments by cuDNN's kernels, which torch has for batches of one length only.

Segments of like length go together as a batch, padded at the end to one of few lengths (cuDNN plans a kernel
for each shape it meets, once a process). Causal queries never look at what stands behind them. Elsewhere the
padding is hidden by the scores alone: one more channel is 1 in every query, 0 in the keys of a segment and
far below zero in its padding, whose weight becomes exactly zero. Short segments, where packing counts for
more, stay with the kernel for packed sequences.

Shapes: T packed tokens, A query heads, K key heads, D head size; a batch has n segments of S tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.masks import Packing
from models.transfer import on_device

LONG = 1024  # tokens from which a segment is worth a batch
STEPS = 8  # lengths between a power of two and the next
CHANNELS = 8  # that a head is widened by; its size must stay a multiple of 8
HIDDEN = -3.0e4  # of padding's extra channel, in bf16's and fp16's range; times the scale, exp() is 0

Packed = Callable[[Tensor, Tensor, Tensor, Packing, float], Tensor]


@dataclass(frozen=True)
class Batch:
    """shape: (n, S). hidden: [n, S, 1, 1] in bf16, 0 or ``HIDDEN`` for keys; None where nothing is padded."""

    shape: tuple[int, int]
    hidden: Tensor | None


@dataclass(frozen=True)
class Split:
    """A packing as batches of long segments and a packing of what is left.

    rows: [R] int64, packed token of each row of the batches and then of ``short``, a segment's last one
    again for padding. valid: [R, 1, 1] bool, False for padding; None where there is none. inverse: [T] int64,
    row of each packed token.
    """

    batches: tuple[Batch, ...]
    short: Packing | None
    rows: Tensor
    valid: Tensor | None
    inverse: Tensor


def padded_length(length: int) -> int:
    """The next of ``STEPS`` lengths an octave."""
    step = max(1, (1 << (length - 1).bit_length() >> 1) // STEPS)
    return -(-length // step) * step


def has_long(packing: Packing) -> bool:
    return packing.max_seqlen >= LONG


def split(packing: Packing) -> Split:
    """Made once for all layers that attend to a packing."""
    if "cudnn" not in packing._shared:
        packing._shared["cudnn"] = _make_split(packing.segments, packing.cu_seqlens.device)
    return packing._shared["cudnn"]


def _make_split(segments: Sequence[int], device: torch.device) -> Split:
    starts = [0, *accumulate(segments)]
    groups: dict[int, list[int]] = {}
    for i, length in enumerate(segments):
        groups.setdefault(padded_length(length) if length >= LONG else 0, []).append(i)
    short = groups.pop(0, [])
    batches, all_rows, all_valid = [], [], []
    for size, members in sorted(groups.items()):
        lengths = torch.tensor([segments[i] for i in members]).unsqueeze(1)
        first = torch.tensor([starts[i] for i in members]).unsqueeze(1)
        steps = torch.arange(size).unsqueeze(0)
        valid = steps < lengths
        all_rows.append((first + torch.minimum(steps, lengths - 1)).flatten())
        all_valid.append(valid.flatten())
        hidden = None
        if not bool(valid.all()):
            hidden = torch.where(valid, 0.0, HIDDEN)[:, :, None, None].to(torch.bfloat16)
            hidden = on_device(hidden, device)
        batches.append(Batch((len(members), size), hidden))
    packed = None
    if short:
        all_rows += [torch.arange(starts[i], starts[i + 1]) for i in short]
        all_valid.append(torch.ones(sum(segments[i] for i in short), dtype=torch.bool))
        packed = Packing.of([segments[i] for i in short], device)
    rows, valid = torch.cat(all_rows), torch.cat(all_valid)
    inverse = torch.empty(starts[-1], dtype=torch.int64)
    inverse[rows[valid]] = torch.arange(len(rows))[valid]
    mask = None if bool(valid.all()) else on_device(valid[:, None, None], device)
    return Split(tuple(batches), packed, on_device(rows, device), mask, on_device(inverse, device))


class _Spread(torch.autograd.Function):
    """[T, ...] -> [R, ...]; what comes back for padding counts for nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Split) -> Tensor:
        ctx.inverse = parts.inverse
        return x.index_select(0, parts.rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.inverse), None


class _Gather(torch.autograd.Function):
    """[R, ...] -> [T, ...]; padding gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Split) -> Tensor:
        ctx.parts = parts
        return x.index_select(0, parts.inverse)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        spread = gradient.index_select(0, ctx.parts.rows)
        return (spread if ctx.parts.valid is None else spread.mul_(ctx.parts.valid)), None


def attend(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float, packed: Packed
) -> Tensor:
    """Query [T, A, D], key and value [T, K, D] -> [T, A, D]. ``packed``: the kernel for short segments."""
    if not has_long(packing):
        return packed(query, key, value, packing, scale)
    parts, causal = split(packing), packing.mask.causal
    sizes = [n * size for n, size in (batch.shape for batch in parts.batches)]
    sizes += [] if parts.short is None else [sum(parts.short.segments)]
    pieces = zip(*(_Spread.apply(x, parts).split(sizes) for x in (query, key, value)), strict=True)
    results = [
        _attend_batch(*piece, batch, causal, scale)
        for batch, piece in zip(parts.batches, pieces, strict=False)
    ]
    if parts.short is not None:
        (piece,) = pieces
        results.append(packed(*piece, replace(parts.short, mask=packing.mask), scale))
    return _Gather.apply(torch.cat(results), parts)


def _attend_batch(
    query: Tensor, key: Tensor, value: Tensor, batch: Batch, causal: bool, scale: float
) -> Tensor:
    """[n * S, A, D], padding included."""
    size = query.shape[-1]
    q, k, v = (x.unflatten(0, batch.shape) for x in (query, key, value))
    if batch.hidden is not None and not causal:
        q, k, v = F.pad(q, (0, CHANNELS), value=1.0), F.pad(k, (0, CHANNELS)), F.pad(v, (0, CHANNELS))
        k[..., size : size + 1] = batch.hidden
    out = _kernel(*(x.transpose(1, 2) for x in (q, k, v)), causal, scale)
    return out.transpose(1, 2)[..., :size].flatten(0, 1)


def _kernel(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
    """[n, A, S, D], key and value [n, K, S, D] -> [n, A, S, D]."""
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention
    return attention(query, key, value, None, torch.is_grad_enabled(), 0.0, causal, False, scale=scale)[0]
