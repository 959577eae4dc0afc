"""Sums over a group where ranks share out work, each with the adjoint that autograd cannot know."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _SumOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def sum_gradient(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The identity, whose gradient is summed over ``group``: before work that ranks share out."""
    return _SumGradient.apply(tensor, group)


def sum_output(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over ``group``, whose gradient is passed on as it is: after work that ranks share out."""
    return _SumOutput.apply(tensor, group)


def sum_parameter_gradients(module: nn.Module, group: ProcessGroup) -> None:
    """Sum every gradient of the module's own parameters over ``group``, in fp32, before it is accumulated.

    The hook is set at the first forward, because loading gives a module new parameters. It sees the gradient
    of one backward, so it is exact when gradients accumulate and when an optimizer takes them away.
    """

    def total(gradient: Tensor) -> Tensor:
        summed = gradient.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed.to(gradient.dtype)

    def watch(module: nn.Module, _: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad and parameter not in watched:
                parameter.register_hook(total)
                watched.append(parameter)

    watched = _Identities()
    module.register_forward_pre_hook(watch)


class _Identities:
    """Tensors by identity; ``in`` of a list would compare their values."""

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return self._held.get(id(tensor)) is tensor

    def append(self, tensor: Tensor) -> None:
        self._held[id(tensor)] = tensor
