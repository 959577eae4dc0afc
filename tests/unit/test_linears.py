"""Several linears as one function, and the layers of towers that use them, against autograd on HF's code."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from models import fused
from models.encoders import build_encoder
from models.linears import are_plain, compute_as_product, mlp, patch_product, project, project_heads
from tests.unit.model_helpers import ENCODERS, encoder_section


def gradients(out: Tensor, *leaves: Tensor) -> list[Tensor | None]:
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    return list(torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True))


@pytest.mark.parametrize("frozen", [False, True])
def test_project(frozen: bool) -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(6, width, bias=bias).double() for width, bias in ((8, True), (4, False), (5, True))]
    linears[1].weight.requires_grad_(not frozen)
    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    leaves = [x, *(p for linear in linears for p in linear.parameters() if p.requires_grad)]
    ours, theirs = project(x, linears), [linear(x) for linear in linears]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    got, expected = (gradients(torch.cat(list(outs), -1), *leaves) for outs in (ours, theirs))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("activation", [nn.GELU(), nn.GELU(approximate="tanh"), lambda x: x.sigmoid() * x])
def test_mlp(frozen: bool, activation) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(6, 9).double(), nn.Linear(9, 6).double()
    first.requires_grad_(not frozen)
    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    leaves = [x, *(p for linear in (first, second) for p in linear.parameters() if p.requires_grad)]
    ours, theirs = mlp(x, first, activation, second), second(activation(first(x)))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradients(ours, *leaves), gradients(theirs, *leaves))


def test_linears_that_are_not_plain() -> None:
    class Other(nn.Linear):
        pass

    plain, other, sharded = nn.Linear(2, 2), Other(2, 2), nn.Linear(2, 2)
    sharded.weight.ds_id = 0
    assert are_plain([plain])
    assert not are_plain([plain, other])
    assert not are_plain([plain, sharded])


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("name", ["siglip", "naflex", "clip", "whisper"])
def test_quick_forwards_of_towers(name: str, filled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """filled: the attention kernel wants larger heads."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**ENCODERS[name])
    encoder = build_encoder("x", encoder_section(ENCODERS[name]), config, 24).double()
    sizes = [(8, 33), (8, 95)] if name == "whisper" else [(3, 16, 16), (3, 8, 20)]
    values = [torch.randn(size) for size in sizes]
    results, calls = [], []
    projections = project_heads if filled else project
    if filled:
        monkeypatch.setattr(fused, "kernel_head_dim", lambda device, dtype, size, packing: size + 3)
    for function in (project, project_heads, mlp):
        counted = lambda *args, function=function: calls.append(function) or function(*args)  # noqa: E731
        monkeypatch.setattr(fused, function.__name__, counted)
    for quick in (False, True):
        monkeypatch.setattr(fused, "_on_gpu", lambda x, quick=quick: quick)
        one = copy.deepcopy(encoder)
        rows = one(values)
        leaves = [p for p in one.parameters() if p.requires_grad]
        results.append((rows, gradients(rows, *leaves)))
        assert set(calls) == ({projections, mlp} if quick else set())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", list(ENCODERS))
def test_towers_with_liger_run_on_a_cpu_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, values = AutoConfig.for_model(**ENCODERS[name]), [torch.randn(3, 16, 16)]
    if name == "whisper":
        values = [torch.randn(8, 33)]
    rows = []
    for liger in (False, True):
        monkeypatch.setattr(fused, "has_liger", lambda liger=liger: liger)
        torch.manual_seed(0)
        rows.append(build_encoder("x", encoder_section(ENCODERS[name]), config, 24)(values))
    torch.testing.assert_close(*rows)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Conv3d])
def test_patch_product(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    convolution = kind(3, 5, 4, stride=4).double()
    patches = torch.randn(7, 3, *(4 for _ in convolution.kernel_size), dtype=torch.float64)
    ours, theirs = patch_product(convolution, patches), convolution(patches)
    torch.testing.assert_close(ours, theirs)
    leaves = list(convolution.parameters())
    torch.testing.assert_close(gradients(ours, *leaves), gradients(theirs, *leaves))
    compute_as_product(convolution)
    torch.testing.assert_close(convolution(patches), theirs)


def test_no_tokens() -> None:
    linear, x = nn.Linear(6, 6), torch.zeros(1, 0, 6, requires_grad=True)
    assert mlp(x, linear, torch.relu, linear).shape == project(x, [linear])[0].shape == (1, 0, 6)
