"""Whether Liger is there. Where it is not wanted, no other Triton kernel (and no C compiler for its launcher)
is either."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch


@cache
def has_liger() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("liger_kernel") is not None
