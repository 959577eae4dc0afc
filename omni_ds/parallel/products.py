"""Matrix products of bf16 or fp16 in fp32: the device's accumulators as they are, where it gives them."""

from __future__ import annotations

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``a @ b`` [n, m] in fp32, into ``out`` where that is given."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    result = (a @ b).float()
    return result if out is None else out.copy_(result)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b`` in fp32, which keeps what a low-precision sum of many products would lose."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    elif a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        total += (a @ b).float()
