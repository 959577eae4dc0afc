"""RMSNorm and LayerNorm as one Triton kernel each way, on CUDA.

torch's backward pass reads a norm's input and gradient a second time for the weight's gradient, and its
kernels give each row a block of threads, however short the row: the heads' norms of Qwen3 have 128 numbers.
Here a program walks over tiles of rows and sums its weight gradients on the way.

A layer adds what follows its norm to what went into it, so that input's gradient comes in two parts. With
``passes`` a norm hands its input on, and its kernel adds the second part while it writes the first.

Shapes: T rows, C numbers of one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.liger import take_kernels

_WIDEST = 16384  # numbers of a row; wider ones would not stay in registers
_TILES = (2048, 4096)  # numbers of a tile forward and backward, where a row is not wider
_PROGRAMS = 8  # of the backward pass on a multiprocessor


def can_norm(x: Tensor, weight: Tensor | None) -> bool:
    """Whether :func:`norm` takes x [..., C] and weight [C]; a bias is held to be like the weight."""
    return (
        weight is not None
        and take_kernels(x, weight)
        and x.dtype == weight.dtype
        and weight.is_contiguous()
        and x.shape[-1:] == weight.shape
        and weight.numel() <= _WIDEST
    )


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, passes: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm of x [..., C] if ``centred``, else RMSNorm, computed in fp32: [..., C] of x's dtype.

    passes: also x itself. Use that for whatever else x goes to: its gradient is then added by the same
    kernel. The device of x has to be the current one, as for every Triton kernel.
    """
    return _Norm.apply(x, weight, bias, eps, centred, passes)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, passes: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        rows = x.contiguous().view(-1, x.shape[-1])
        out = torch.empty_like(x, memory_format=torch.contiguous_format)  # no view: it may be written over
        rstd = rows.new_empty(len(rows), dtype=torch.float32)
        mean = torch.empty_like(rstd) if centred else None
        ctx.centred = centred
        if len(rows):
            from models.norm_kernels import norm_forward

            shape = _shape(rows.shape[1], _TILES[0])
            norm_forward[(-(-len(rows) // shape["ROWS"]),)](
                rows, weight, bias, out, mean, rstd, len(rows), eps,
                CENTRED=centred, BIAS=bias is not None, **shape,
            )  # fmt: skip
        ctx.save_for_backward(rows, weight, bias, mean, rstd)
        return (out, x) if passes else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, passed: Tensor | None = None) -> tuple[Tensor | None, ...]:
        rows, weight, bias, mean, rstd = ctx.saved_tensors
        shape, device = _shape(rows.shape[1], _TILES[1]), rows.device
        programs = min(-(-len(rows) // shape["ROWS"]), _PROGRAMS * _multiprocessors(device))
        d_x = torch.empty_like(rows)
        d_weight = torch.empty(programs, rows.shape[1], dtype=torch.float32, device=device)
        d_bias = None if bias is None else torch.empty_like(d_weight)
        if programs:
            from models.norm_kernels import norm_backward

            norm_backward[(programs,)](
                rows, weight, gradient.contiguous(), None if passed is None else passed.contiguous(),
                mean, rstd, d_x, d_weight, d_bias, len(rows),
                CENTRED=ctx.centred, BIAS=bias is not None, PASSED=passed is not None, **shape,
            )  # fmt: skip
        wants = ctx.needs_input_grad
        d_weight = d_weight.sum(0).to(weight.dtype) if wants[1] else None
        d_bias = d_bias.sum(0).to(weight.dtype) if wants[2] else None
        return d_x.view(gradient.shape), d_weight, d_bias, None, None, None


def _shape(width: int, tile: int) -> dict[str, int]:
    """What the kernels are compiled for; tiles and warps by measurement on an H200."""
    block = max(16, 1 << (width - 1).bit_length())
    warps = next(warps for warps in (16, 8, 4, 2) if width >= 512 * warps or warps == 2)
    return {"WIDTH": width, "BLOCK": block, "ROWS": max(1, tile // block), "num_warps": warps}


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
