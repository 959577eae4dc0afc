"""The flash-attn packages, generations 2 to 4, as kernels for packed sequences.

They are installed on their own: ``flash_attn`` (2), ``flash_attn_interface`` (3, Hopper), and
``flash_attn.cute`` (4, in the same namespace as 2; compiled at its first calls).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from models.masks import Packing
from models.spans import Call, attend

GENERATIONS = {
    2: ("flash_attn", "flash_attn_varlen_func"),
    3: ("flash_attn_interface", "flash_attn_varlen_func"),
    4: ("flash_attn.cute", "flash_attn_varlen_func"),
}
# Major compute capabilities. 4 is made for newer GPUs as well, with limits of its own; tried on Hopper alone.
_CAPABILITIES = {2: range(8, 100), 3: range(9, 10), 4: range(9, 10)}

# On Hopper, one kernel of generation 4's backward pass lays its sums out for head sizes rounded up to 16, the
# others for 32: between them the gradients of queries are wrong (4.0.0b36). Zeros change no result.
HEAD_DIM_MULTIPLE = {4: 32}


@cache
def usable(generation: int) -> bool:
    """Whether the package of a generation is installed and made for this GPU."""
    return (
        torch.cuda.is_available()
        and torch.cuda.get_device_capability()[0] in _CAPABILITIES[generation]
        and _installed(generation)
    )


def _installed(generation: int) -> bool:
    module = GENERATIONS[generation][0]
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of the parent
        return False
    # With generation 4 alone, flash_attn is a namespace without a file.
    return found is not None and found.origin is not None


@cache
def _function(generation: int) -> Callable:
    module, name = GENERATIONS[generation]
    return getattr(importlib.import_module(module), name)


def run(generation: int, query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float) -> Tensor:
    """Query [T, A, D], key and value [T, K, D] -> [T, A, D], fp16 or bf16."""
    function, softcap = _function(generation), packing.mask.softcap or 0.0
    size = query.shape[-1]
    missing = -size % HEAD_DIM_MULTIPLE.get(generation, 1)
    if missing:
        query, key, value = (F.pad(x, (0, missing)) for x in (query, key, value))

    def kernel(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        window = tuple(None if generation == 4 and side < 0 else side for side in call.window)
        out = function(
            query,
            key,
            value,
            cu_seqlens_q=call.cu_queries,
            cu_seqlens_k=call.cu_keys,
            max_seqlen_q=call.longest_query,
            max_seqlen_k=call.longest_key,
            softmax_scale=scale,
            causal=call.causal,
            window_size=window,
            softcap=softcap,
        )
        return out[0] if isinstance(out, tuple) else out  # releases of 3 and 4 return statistics as well

    out = attend(kernel, query, key, value, packing)
    return out[..., :size] if missing else out
