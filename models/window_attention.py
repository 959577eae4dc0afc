"""Attention in short windows with its rotation, as one Triton kernel each way.

The vision towers of Qwen2.5-VL and -Omni attend in windows of 8 x 8 patches in most of their layers;
packings of small images alone are as short in those of Qwen2-VL and Qwen3-VL. Kernels for packed sequences
walk tiles of 128 tokens, take the rotated queries and keys from memory and keep them. A window of at most
``LONGEST`` tokens is one tile: a program loads a head's rows once, turns them, and writes what it gave; its
backward pass makes the scores again, so that only the projections' outputs are kept.

Shapes: T packed tokens, A heads, D head size, n windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.liger import has_liger
from models.masks import MaskSpec, Packing
from omni_ds.plan.activations import SHORT_WINDOW

LONGEST = SHORT_WINDOW  # the tiles of a longer window would not stay in registers
_LARGEST_HEAD = 128
_WARPS = 4


def can_attend(hidden: Tensor, packing: Packing, head_dim: int) -> bool:
    """Whether :func:`window_attention` does a layer's attention: on a GPU, in bf16, with whole and short
    windows. Where Liger is not wanted, no other Triton kernel (and no C compiler for its launcher) is."""
    return (
        hidden.is_cuda
        and hidden.dtype == torch.bfloat16
        and packing.max_seqlen <= LONGEST
        and packing.mask == MaskSpec()
        and packing.ulysses is None
        and head_dim % 2 == 0
        and head_dim <= _LARGEST_HEAD
        and has_liger()
    )


def window_attention(
    projected: Sequence[Tensor], heads: int, cos: Tensor, sin: Tensor, packing: Packing
) -> Tensor:
    """[T, A * D]: every token sees all of its window, with a scale of D**-0.5, queries and keys turned by
    halves in fp32.

    projected: queries, keys and values side by side [T, 3 * A * D], or one [T, A * D] each. cos, sin: [T, D]
    fp32, the second half of each row as the first. All contiguous.
    """
    assert all(x.is_contiguous() for x in (*projected, cos, sin)), "rows would be read and written elsewhere"
    return _WindowAttention.apply(heads, cos, sin, packing.cu_seqlens, packing.max_seqlen, *projected)


def _three(projected: Sequence[Tensor]) -> Sequence[Tensor]:
    return projected[0].chunk(3, dim=1) if len(projected) == 1 else projected


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads: int, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, longest: int, *projected: Tensor
    ) -> Tensor:
        ctx.save_for_backward(cos, sin, cu_seqlens, *projected)
        ctx.heads, ctx.longest = heads, longest
        query, key, value = _three(projected)
        out = query.new_empty(query.shape)
        _launch("forward", heads, longest, cos, sin, cu_seqlens, query, key, value, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, cu_seqlens, *projected = ctx.saved_tensors
        gradients = [torch.empty_like(part) for part in projected]
        tensors = (*_three(projected), gradient.contiguous(), *_three(gradients))
        _launch("backward", ctx.heads, ctx.longest, cos, sin, cu_seqlens, *tensors)
        return None, None, None, None, None, *gradients


def _launch(
    name: str, heads: int, longest: int, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, *tensors: Tensor
) -> None:
    """A program for each head of each window. tensors: [T, A * D], those of one projection of one stride."""
    windows, half = len(cu_seqlens) - 1, cos.shape[1] // 2
    if not windows:
        return
    import triton

    from models import window_kernels

    getattr(window_kernels, name)[(windows * heads,)](
        cu_seqlens,
        cos,
        sin,
        *tensors,
        tensors[0].stride(0),
        tensors[3].stride(0),
        (2 * half) ** -0.5,
        HEADS=heads,
        HALF=half,
        COLUMNS=max(16, triton.next_power_of_2(half)),
        TOKENS=max(16, triton.next_power_of_2(longest)),
        num_warps=_WARPS,
    )
