"""A gated MLP as one function: less is kept for the backward pass, and odd widths get aligned products.

``down(silu(gate(x)) * up(x))``. Autograd keeps the product of gate and up besides both; it is one cheap pass
to make again. And a width whose rows are no multiple of 16 bytes (3420 in Qwen2.5-VL's vision tower) sends
cuBLAS to kernels of older GPUs, several times slower: weights are padded with zeros for the time of a
product, which changes no result.

Shapes: T tokens, C width of the model, I of the MLP.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.activation_gradients import gated_backward
from models.liger import take_kernels
from models.linears import are_plain
from models.weight_gradient import adder, bias_gradient, weight_gradient

ALIGNMENT = 8  # numbers of two bytes; Hopper's copy engine takes rows of a multiple of 16 bytes


def can_fuse(mlp: nn.Module) -> bool:
    """Whether a module is such an MLP of plain linears (:func:`are_plain`)."""
    linears = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not are_plain(linears):
        return False
    return "silu" in type(getattr(mlp, "act_fn", None)).__name__.lower()


def gated_mlp(mlp: nn.Module, x: Tensor) -> Tensor:
    """The MLP's result [..., C] for x [..., C], on any device."""
    parts = [
        p for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj) for p in (linear.weight, linear.bias)
    ]
    return _GatedMLP.apply(x.flatten(0, -2), *parts).view_as(x)


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weight: Tensor,
        gate_bias: Tensor | None,
        up_weight: Tensor,
        up_bias: Tensor | None,
        down_weight: Tensor,
        down_bias: Tensor | None,
    ) -> Tensor:
        gate = F.linear(x, _tall(gate_weight), _tall(gate_bias))
        up = F.linear(x, _tall(up_weight), _tall(up_bias))
        ctx.save_for_backward(x, gate, up, gate_weight, up_weight, down_weight)
        ctx.adders = tuple(adder(weight) for weight in (gate_weight, up_weight, down_weight))
        return F.linear(_product(gate, up), _wide(down_weight), down_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, gate_weight, up_weight, down_weight = ctx.saved_tensors
        wants, width = ctx.needs_input_grad, gate_weight.shape[0]
        tall, wide = None, None
        if _missing(width):
            tall, wide = lambda product: product[:width], lambda product: product[:, :width]
        product, d_gate, d_up, gate_bias, up_bias = gated_backward(
            gate, up, gradient @ _wide(down_weight), sums=wants[2] or wants[4]
        )
        down = None
        if wants[5]:
            down = weight_gradient(gradient, product, ctx.adders[2], wide, down_weight.shape)
        del product
        d_x = None
        if wants[0]:
            d_x = torch.addmm(d_up @ _tall(up_weight), d_gate, _tall(gate_weight))
        weights = [
            weight_gradient(d, x, add, tall, gate_weight.shape) if want else None
            for d, want, add in zip((d_gate, d_up), (wants[1], wants[3]), ctx.adders[:2], strict=True)
        ]
        gate_bias, up_bias = (
            bias[:width] if want else None for bias, want in ((gate_bias, wants[2]), (up_bias, wants[4]))
        )
        down_bias = bias_gradient(gradient) if wants[6] else None
        return d_x, weights[0], gate_bias, weights[1], up_bias, down, down_bias


def _missing(width: int) -> int:
    return -width % ALIGNMENT


def _tall(weight: Tensor | None) -> Tensor | None:
    """[I, ...] -> [I rounded up, ...], zeros behind."""
    if weight is None or not _missing(weight.shape[0]):
        return weight
    return F.pad(weight, (0, 0) * (weight.dim() - 1) + (0, _missing(weight.shape[0])))


def _wide(weight: Tensor) -> Tensor:
    """[C, I] -> [C, I rounded up]."""
    missing = _missing(weight.shape[1])
    return F.pad(weight, (0, missing)) if missing else weight


def _product(gate: Tensor, up: Tensor) -> Tensor:
    if not take_kernels(gate):
        return F.silu(gate) * up
    from liger_kernel.ops.swiglu import swiglu_forward

    return swiglu_forward(gate, up)[2]
