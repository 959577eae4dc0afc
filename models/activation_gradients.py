"""Backward passes of what stands between the linears of an MLP: of GELU and gated products one kernel each.

What an activation gave is made again there, for the gradient of the linear behind it. Apart, that is a pass
to make it, one for the activation's gradient and one for the sum of that gradient's rows (a bias's gradient),
and each takes as long as its bytes: one kernel reads and writes everything once (sums of tiles are added up
behind it). Where kernels do not run (models/liger.py), and for other activations, autograd does it.

Shapes: T tokens, I numbers between the linears.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from transformers.activations import GELUActivation, GELUTanh

from models.liger import take_kernels
from models.weight_gradient import bias_gradient


def activation_backward(
    activation: Callable[[Tensor], Tensor], between: Tensor, gradient: Tensor, sums: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``activation(between)``, the gradient of ``between`` and, with ``sums``, the sum of its rows [I].

    Any activation is right; torch's GELU, also inside HF's modules, is one kernel. between: [T, I]; gradient:
    [T, I], of ``activation(between)``, may be written over; both contiguous.
    """
    approximation = _approximation(activation)
    if approximation is None or not take_kernels(between):
        with torch.enable_grad():
            between = between.detach().requires_grad_()
            active = activation(between)
        (inner,) = torch.autograd.grad(active, between, gradient)
        return active.detach(), inner, bias_gradient(inner) if sums else None

    from models.activation_kernels import gelu_backward as kernel

    inner = torch.empty_like(between)
    (total,) = _launch(kernel, (between, gradient, inner), 1, sums, TANH=approximation == "tanh")
    return gradient, inner, total


def gated_backward(
    gate: Tensor, up: Tensor, gradient: Tensor, sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """``silu(gate) * up``, the gradients of gate and up and, with ``sums``, the sums of their rows [I].

    gate, up: [T, I]; gradient: [T, I], of the product; all contiguous. The kernel writes over all three: a
    graph that saved them cannot be walked twice, and autograd says so where one is.
    """
    if not take_kernels(gate):
        sigmoid = gate.sigmoid()
        d_gate = gradient * up * sigmoid * (1 + gate * (1 - sigmoid))
        d_up = gradient * gate * sigmoid
        totals = [bias_gradient(d) if sums else None for d in (d_gate, d_up)]
        return F.silu(gate) * up, d_gate, d_up, *totals

    from models.activation_kernels import gated_backward as kernel

    totals = _launch(kernel, (gate, up, gradient), 2, sums)
    increment_version((gate, up, gradient))  # Triton's writes are not seen by autograd
    return gradient, gate, up, *totals


def _approximation(activation: Callable[[Tensor], Tensor]) -> str | None:
    """The argument ``approximate`` of ``torch.nn.functional.gelu``, or None of another function."""
    if type(activation) is nn.GELU:
        return activation.approximate
    # HF's modules call what they hold: torch's function, or one in Python that autograd is left with.
    function = activation.act if type(activation) in (GELUActivation, GELUTanh) else activation
    if isinstance(function, partial) and function.func is F.gelu and not function.args:
        return function.keywords.get("approximate", "none")
    return "none" if function is F.gelu else None


def _launch(
    kernel: Any, tensors: Sequence[Tensor], count: int, sums: bool, **flags: bool
) -> list[Tensor | None]:
    """Run a kernel on tensors [T, I]; ``count`` sums of rows [I] in the tensors' dtype, or None each."""
    assert all(x.is_contiguous() for x in tensors), "rows would be read and written elsewhere"
    rows, width = tensors[0].shape
    tile = _tile(width, sums)
    below, across = -(-rows // tile["ROWS"]), -(-width // tile["COLUMNS"])
    partial_sums = tensors[0].new_empty(count, below if sums else 0, width, dtype=torch.float32)
    if rows:
        kernel[(below * across,)](*tensors, *partial_sums, rows, width, SUMS=sums, **tile, **flags)
    return list(partial_sums.sum(1).to(tensors[0].dtype)) if sums else [None] * count


def _tile(width: int, sums: bool) -> dict[str, int]:
    """Of a program; by measurement on an H200 (benchmarks/reports/single_gpu_h200.md)."""
    if not sums:
        return {"ROWS": 8, "COLUMNS": 256}
    # Where rows start at cache lines, narrow tiles are quicker, elsewhere they would share lines.
    return {"ROWS": 32, "COLUMNS": 128 if width % 64 else 64}
