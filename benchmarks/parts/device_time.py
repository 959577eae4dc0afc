"""Where the device's time goes in a step, by kinds of kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

# The first that is found in a kernel's name; names of CUDA's libraries, torch, Triton and flash-attn.
KINDS = {
    "attention": r"flash|fmha|varlen|^(forward|backward)$",
    "matrix products": r"nvjet|gemm|gemv|cutlass|splitk|cublas|grouped_mm",
    "norms": r"^norm_|layer_?norm|rms_?norm|gammabeta",
    "gated products, GELU": r"swiglu|silu|gelu|^gated_",
    "rotation": r"rope|rotary",
    "cross-entropy": r"softmax|maxnan|scatter_gather|scatter_add",
    "AdamW": r"fusedoptimizer|fusedadam",
    "gradient norm, clipping": r"multi_tensor|lpnorm",
    "copies and fills": r"copy|memcpy|memset|fill|catarray|gather|index",
    "sums": r"reduce_kernel",
    "other single numbers": r"elementwise",
    "others": r"",
}


class Kernel(NamedTuple):
    """start, end: microseconds on the device."""

    name: str
    start: float
    end: float


def kind_of(name: str) -> str:
    """A key of ``KINDS``."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))


def device_time(kernels: Iterable[Kernel]) -> list[tuple[str, float, int]]:
    """(kind, milliseconds, kernels), the dearest first, last the time between kernels: ("nothing", ms, 0).

    Empty without kernels.
    """
    time, count = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0)
    gaps, end = 0.0, None
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        kind = kind_of(kernel.name)
        # What runs beside an earlier kernel takes no time of its own.
        since = kernel.start if end is None else max(end, kernel.start)
        gaps += 0.0 if end is None else since - end
        time[kind] += max(0.0, kernel.end - since)
        count[kind] += 1
        end = max(since, kernel.end)
    rows = [(kind, time[kind] / 1e3, count[kind]) for kind in KINDS if count[kind]]
    return [*sorted(rows, key=lambda row: -row[1]), ("nothing", gaps / 1e3, 0)] if rows else []


def profile(run: Callable[[], object], sync: Callable[[], object]) -> list[tuple[str, float, int]]:
    """:func:`device_time` of ``run()`` on a GPU; ``sync`` waits for the device. Empty without one."""
    import torch
    from torch.autograd import DeviceType

    if not torch.cuda.is_available():
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        sync()
        run()
        sync()
    return device_time(
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )


def table(rows: list[tuple[str, float, int]]) -> str:
    """One line a kind, and the whole."""
    whole = sum(ms for _, ms, _ in rows)
    lines = [f"{kind:26}{ms:10.1f} ms{ms / whole:8.1%}{count:8d} kernels" for kind, ms, count in rows]
    return "\n".join([*lines, f"{'all':26}{whole:10.1f} ms"])
