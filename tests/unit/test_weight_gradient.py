"""Gradients of weights that go into sums of an optimizer instead of being tensors of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import fused
from models.gated_mlp import gated_mlp
from models.linears import linear_of_heads, mlp, project, project_heads
from models.weight_gradient import ADD_PRODUCT, Cut, adder
from omni_ds.engine.bf16_adapter import Bf16Adapter
from tests.unit.test_gated_mlp import MLP


def add_product(total: Tensor, a: Tensor, b: Tensor, cut: Cut | None) -> None:
    product = a @ b
    total.add_(product if cut is None else cut(product).reshape(total.shape))


def give_sums(module: nn.Module) -> dict[str, Tensor]:
    """Sums of zeros for all weights of a module, by name."""
    sums = {}
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2:
            sums[name] = torch.zeros_like(parameter)
            setattr(parameter, ADD_PRODUCT, partial(add_product, sums[name]))
    return sums


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(6, width, bias=width != 4) for width in (8, 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self.linears], -1)


class Heads(Three):
    """Of 4 numbers, filled up to 6 between the linears."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(6, 8, bias=n != 1) for n in range(3))
        self.out = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (linear(x) for linear in self.linears)
        return self.out(query * key + value)

    def filled(self, x: Tensor) -> Tensor:
        query, key, value = project_heads(x, list(self.linears), 4, 6)
        return linear_of_heads(self.out, (query * key + value).flatten(-2), 4, 6)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)))


CASES = {
    "project": (Three(), lambda m, x: torch.cat(project(x, list(m.linears)), -1)),
    "mlp": (Two(), lambda m, x: mlp(x, m.first, F.gelu, m.second)),
    "gated": (MLP(6, 8, True), gated_mlp),
    "gated, padded": (MLP(6, 11, True), gated_mlp),
    "heads": (Heads(), lambda m, x: m.filled(x)),
    "linear": (nn.Linear(6, 5), lambda m, x: fused._linear(m, x)),
}


@pytest.mark.parametrize("name", CASES)
def test_sums_hold_the_gradients(name: str) -> None:
    torch.manual_seed(0)
    module, quick = CASES[name]
    plain, ours = copy.deepcopy(module).double(), copy.deepcopy(module).double()
    sums = give_sums(ours)
    x, other = torch.randn(2, 7, 6, dtype=torch.float64), torch.randn(2, 7, 6, dtype=torch.float64)
    for value in (x, other):
        plain(value).sin().sum().backward()
        quick(ours, value).sin().sum().backward()
    for name, parameter in ours.named_parameters():
        expected = plain.get_parameter(name).grad
        if name in sums:
            assert parameter.grad is None
            torch.testing.assert_close(sums[name], expected)
        else:
            torch.testing.assert_close(parameter.grad, expected)


def test_a_hook_gets_its_gradient() -> None:
    linear, seen = nn.Linear(3, 2), []
    give_sums(linear)
    assert adder(linear.weight) is not None
    linear.weight.register_hook(lambda gradient: seen.append(gradient))
    assert adder(linear.weight) is None
    project(torch.randn(4, 3), [linear])[0].sum().backward()
    assert len(seen) == 1 and linear.weight.grad is not None


def of_optimizer(weights: list[nn.Parameter]) -> SimpleNamespace:
    """What the adapter reads of DeepSpeed's optimizer; sums begin with what an earlier step left."""
    return SimpleNamespace(
        bf16_groups=[weights],
        fp32_groups_gradients=[
            [torch.full((weight.numel(),), 7.0, device=weight.device) for weight in weights]
        ],
        fp32_groups_has_gradients=[[False] * len(weights)],
        autoep_folding_tp_group=None,
        immediate_grad_update=True,
    )


@pytest.mark.parametrize(
    "order", ["product first", "gradient first", "products", "gradients", "part first", "parts"]
)
def test_adapter_adds_up(order: str) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16))
    adapter = Bf16Adapter(of_optimizer([weight]))
    a, b = torch.randn(4, 5).bfloat16(), torch.randn(5, 3).bfloat16()
    product, gradient = (a @ b).float(), torch.randn(4, 3).bfloat16()

    def add_product() -> Tensor:
        adapter._add_product(weight, 0, 0, a, b, None)
        return product

    def add_part() -> Tensor:
        adapter._add_product(weight, 0, 0, F.pad(a, (0, 0, 0, 2)), b, lambda padded: padded[:4])
        return product

    def add_gradient() -> Tensor:
        weight.grad = gradient.clone()
        adapter._accumulate(weight, 0, 0, clear_lp_grads=False)
        return gradient.float()

    steps: dict[str, list[Callable[[], Tensor]]] = {
        "product first": [add_product, add_gradient],
        "gradient first": [add_gradient, add_product],
        "products": [add_product] * 3,
        "part first": [add_part, add_gradient, add_product],
        "parts": [add_product, add_part, add_part],
        "gradients": [add_gradient] * 3,
    }
    expected = sum(add() for add in steps[order])
    torch.testing.assert_close(adapter.gradient(weight).view(4, 3), expected)
    adapter._forget()
    assert adapter.gradient(weight) is None


@pytest.mark.parametrize("bias", [False, True])
def test_heads_with_zeros_behind(bias: bool) -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(6, 12, bias=bias or n == 1).double() for n in range(3)]
    back = nn.Linear(12, 6).double()
    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    leaves = [x, *(p for linear in (*linears, back) for p in linear.parameters())]
    plain = [linear(x).unflatten(-1, (4, 3)) for linear in linears]
    filled = project_heads(x, linears, 3, 5)
    for one, other in zip(filled, plain, strict=True):
        torch.testing.assert_close(one[..., :3], other)
        assert not one[..., 3:].any()
    ours = linear_of_heads(back, (filled[0] * filled[1] + filled[2]).flatten(-2), 3, 5)
    theirs = back((plain[0] * plain[1] + plain[2]).flatten(-2))
    torch.testing.assert_close(ours, theirs)
    got, expected = (torch.autograd.grad(out.sin().sum(), leaves) for out in (ours, theirs))
    torch.testing.assert_close(got, expected)
