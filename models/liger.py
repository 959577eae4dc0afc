"""Where Triton kernels run: Liger's, and with it ours. Without Liger none of ours runs either, so that a
machine without a C compiler for their launcher trains all the same."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor


@cache
def has_liger() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("liger_kernel") is not None


def take_kernels(*tensors: Tensor) -> bool:
    """Whether kernels that compute in float32 take these: with Liger, on CUDA, of bfloat16 or float32."""
    return has_liger() and all(x.is_cuda and x.dtype in (torch.bfloat16, torch.float32) for x in tensors)
