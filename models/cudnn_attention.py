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
    """rows: [n * S] int64, packed tokens (a segment's last one again for padding); hidden: [n, S, 1, 1] 0 or
    ``HIDDEN`` for keys, None where nothing is padded; shape: (n, S)."""

    rows: Tensor
    hidden: Tensor | None
    shape: tuple[int, int]


@dataclass(frozen=True)
class Split:
    """A packing cut in batches of long segments and what is left. short_rows: [tokens] int64 of the ``short``
    packing, None where there is none. inverse: [T] int64, where each packed token's result stands in the
    results one after the other."""

    batches: tuple[Batch, ...]
    short: Packing | None
    short_rows: Tensor | None
    inverse: Tensor


def padded_length(length: int) -> int:
    """The next of ``STEPS`` lengths an octave."""
    step = max(1, (1 << (length - 1).bit_length() >> 1) // STEPS)
    return -(-length // step) * step


def split(packing: Packing) -> Split:
    """Made once for all layers that attend to a packing."""
    if "cudnn" not in packing._shared:
        packing._shared["cudnn"] = _make_split(packing.segments, packing.cu_seqlens.device)
    return packing._shared["cudnn"]


def _make_split(segments: Sequence[int], device: torch.device) -> Split:
    starts, start = [], 0
    for length in segments:
        starts.append(start)
        start += length
    inverse, done = torch.empty(start, dtype=torch.int64), 0
    groups: dict[int, list[int]] = {}
    short = [i for i, length in enumerate(segments) if length < LONG]
    for i, length in enumerate(segments):
        if length >= LONG:
            groups.setdefault(padded_length(length), []).append(i)
    batches = []
    for size, members in sorted(groups.items()):
        lengths = torch.tensor([segments[i] for i in members]).unsqueeze(1)
        first = torch.tensor([starts[i] for i in members]).unsqueeze(1)
        steps = torch.arange(size).unsqueeze(0)
        rows, valid = first + torch.minimum(steps, lengths - 1), steps < lengths
        inverse[rows[valid]] = done + torch.arange(rows.numel()).view_as(rows)[valid]
        done += rows.numel()
        hidden = None
        if not bool(valid.all()):
            hidden = on_device(torch.where(valid, 0.0, HIDDEN)[:, :, None, None], device)
        batches.append(Batch(on_device(rows.flatten(), device), hidden, (len(members), size)))
    packed = rows = None
    if short:
        rows = torch.cat([torch.arange(starts[i], starts[i] + segments[i]) for i in short])
        inverse[rows] = done + torch.arange(rows.numel())
        packed, rows = Packing.of([segments[i] for i in short], device), on_device(rows, device)
    return Split(tuple(batches), packed, rows, on_device(inverse, device))


def attend(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float, packed: Packed
) -> Tensor:
    """Query [T, A, D], key and value [T, K, D] -> [T, A, D]. ``packed``: the kernel for short segments."""
    parts = split(packing)
    if not parts.batches:
        return packed(query, key, value, packing, scale)
    results = [_attend_batch(query, key, value, batch, packing.mask.causal, scale) for batch in parts.batches]
    if parts.short is not None:
        rows, short = parts.short_rows, replace(parts.short, mask=packing.mask)
        results.append(packed(*(x.index_select(0, rows) for x in (query, key, value)), short, scale))
    return torch.cat(results).index_select(0, parts.inverse)


def _attend_batch(
    query: Tensor, key: Tensor, value: Tensor, batch: Batch, causal: bool, scale: float
) -> Tensor:
    """[n * S, A, D], padding included."""
    size = query.shape[-1]
    q, k, v = (x.index_select(0, batch.rows).unflatten(0, batch.shape) for x in (query, key, value))
    if batch.hidden is not None and not causal:
        q, k, v = (F.pad(x, (0, CHANNELS)) for x in (q, k, v))
        q[..., size] = 1.0
        k[..., size : size + 1] = batch.hidden
    out = _kernel(*(x.transpose(1, 2) for x in (q, k, v)), causal, scale)
    return out.transpose(1, 2)[..., :size].flatten(0, 1)


def _kernel(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
    """[n, A, S, D], key and value [n, K, S, D] -> [n, A, S, D]."""
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention
    return attention(query, key, value, None, torch.is_grad_enabled(), 0.0, causal, False, scale=scale)[0]
