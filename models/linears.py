"""Linear layers side by side or behind each other as one function each.

Autograd makes the gradient of an input of several linears as several tensors and adds them up, and keeps what
stands between two linears although it is cheap to make again. Here a product adds to the one before, and what
an activation gave is made again in the backward pass.

Shapes: T tokens, C width of the input, I of what is between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.activation_gradients import activation_backward
from models.weight_gradient import adder, bias_gradient, weight_gradient


def are_plain(linears: Sequence[nn.Module]) -> bool:
    """Whether all are linears as they come from torch: none that is cut over ranks, or has adapters, or whose
    weights ZeRO-3 gathers only while the linear itself runs."""
    return all(type(linear) is nn.Linear and not hasattr(linear.weight, "ds_id") for linear in linears)


def project(x: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Each linear of x [..., C]: [..., width]."""
    outputs = _Projections.apply(x.flatten(0, -2), None, *_parts(linears))
    return tuple(out.unflatten(0, x.shape[:-1]) for out in outputs)


def project_heads(x: Tensor, linears: Sequence[nn.Linear], size: int, width: int) -> tuple[Tensor, ...]:
    """Each linear of x [..., C] as heads [..., heads, width], of which all but the first ``size`` numbers are
    zeros."""
    outputs = _Projections.apply(x.flatten(0, -2), (size, width), *_parts(linears))
    return tuple(out.view(*x.shape[:-1], -1, width) for out in outputs)


def linear_of_heads(linear: nn.Linear, x: Tensor, size: int, width: int) -> Tensor:
    """The linear of heads [..., heads * width] of which it knows the first ``size`` numbers."""
    out = _LinearOfHeads.apply(x.flatten(0, -2), linear.weight, linear.bias, size, width)
    return out.unflatten(0, x.shape[:-1])


def _parts(linears: Sequence[nn.Linear]) -> list[Tensor | None]:
    return [part for linear in linears for part in (linear.weight, linear.bias)]


def mlp(x: Tensor, first: nn.Linear, activation: Callable[[Tensor], Tensor], second: nn.Linear) -> Tensor:
    """``second(activation(first(x)))`` for x [..., C]; activation: a function of single numbers."""
    out = _MLP.apply(x.flatten(0, -2), first.weight, first.bias, activation, second.weight, second.bias)
    return out.unflatten(0, x.shape[:-1])


def compute_as_product(convolution: nn.Module) -> None:
    """For a convolution of patches of its kernel's size, [n, ...] -> [n, width, 1, ...]: a product
    is several times quicker on a GPU. The weight is still read by the module alone."""
    convolution.forward = MethodType(_on_patches, convolution)


def _on_patches(self: nn.Module, patches: Tensor) -> Tensor:
    if not patches.is_cuda:
        return type(self).forward(self, patches)
    return patch_product(self, patches)


def patch_product(convolution: nn.Module, patches: Tensor) -> Tensor:
    """What the convolution gives for patches of its kernel's size."""
    weight = convolution.weight
    rows = F.linear(patches.flatten(1), weight.flatten(1), convolution.bias)
    return rows.view(*rows.shape, *(1 for _ in weight.shape[2:]))


class _Projections(torch.autograd.Function):
    """heads: (numbers of a head, of those that it is filled up to with zeros); None: as they are."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, heads: tuple[int, int] | None, *parts: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.adders, ctx.heads = [adder(weight) for weight in parts[::2]], heads
        ctx.shapes = [weight.shape for weight in parts[::2]]
        if heads:
            parts = tuple(None if part is None else _fill_rows(part, *heads) for part in parts)
        weights, biases = parts[::2], parts[1::2]
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wants, total = ctx.needs_input_grad, None
        if wants[0]:
            total = gradients[0] @ weights[0]
            for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
                total.addmm_(gradient, weight)
        cut = partial(_cut_rows, size=ctx.heads[0], width=ctx.heads[1]) if ctx.heads else None
        parts = []
        for number, gradient in enumerate(gradients):
            weight = bias = None
            if wants[2 + 2 * number]:
                weight = weight_gradient(gradient, x, ctx.adders[number], cut, ctx.shapes[number])
            if wants[3 + 2 * number]:
                bias = bias_gradient(gradient) if cut is None else cut(bias_gradient(gradient)).flatten()
            parts += [weight, bias]
        return total, None, *parts


class _LinearOfHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, size: int, width: int) -> Tensor:
        ctx.adder, ctx.shape, ctx.heads = adder(weight), weight.shape, (size, width)
        filled = F.pad(weight.unflatten(1, (-1, size)), (0, width - size)).flatten(1)
        ctx.save_for_backward(x, filled)
        return F.linear(x, filled, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, filled = ctx.saved_tensors
        wants = ctx.needs_input_grad
        weight = None
        if wants[1]:
            cut = partial(_cut_columns, size=ctx.heads[0], width=ctx.heads[1])
            weight = weight_gradient(gradient, x, ctx.adder, cut, ctx.shape)
        bias = bias_gradient(gradient) if wants[2] else None
        return gradient @ filled if wants[0] else None, weight, bias, None, None


def _fill_rows(part: Tensor, size: int, width: int) -> Tensor:
    """A weight [heads * size, C] or bias [heads * size] -> [heads * width, ...], zeros behind each head."""
    heads = part.unflatten(0, (-1, size))
    return F.pad(heads, (0, 0) * (part.dim() - 1) + (0, width - size)).flatten(0, 1)


def _cut_columns(filled: Tensor, size: int, width: int) -> Tensor:
    """[n, heads * width] -> [n, heads, size]: the numbers of a weight that knows the first of each head."""
    return filled.unflatten(1, (-1, width))[..., :size]


def _cut_rows(filled: Tensor, size: int, width: int) -> Tensor:
    """[heads * width, ...] -> [heads, size, ...]: what :func:`_fill_rows` was given, as a view."""
    return filled.unflatten(0, (-1, width))[:, :size]


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        first_weight: Tensor,
        first_bias: Tensor | None,
        activation: Callable[[Tensor], Tensor],
        second_weight: Tensor,
        second_bias: Tensor | None,
    ) -> Tensor:
        between = F.linear(x, first_weight, first_bias)
        ctx.save_for_backward(x, between, first_weight, second_weight)
        ctx.activation, ctx.adders = activation, (adder(first_weight), adder(second_weight))
        return F.linear(activation(between), second_weight, second_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, between, first_weight, second_weight = ctx.saved_tensors
        wants = ctx.needs_input_grad
        active, inner, first_bias = activation_backward(
            ctx.activation, between, gradient @ second_weight, sums=wants[2]
        )
        second = weight_gradient(gradient, active, ctx.adders[1]) if wants[4] else None
        second_bias = bias_gradient(gradient) if wants[5] else None
        del active
        first = weight_gradient(inner, x, ctx.adders[0]) if wants[1] else None
        return inner @ first_weight if wants[0] else None, first, first_bias, None, second, second_bias
