"""Fused functions on a CUDA device, against the plain ones on the CPU in fp32."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from models.fused import rotated
from models.gated_mlp import gated_mlp
from models.masks import Packing
from models.weight_gradient import bias_gradient
from models.window_attention import can_attend, window_attention
from omni_ds.parallel.linear_cross_entropy import linear_cross_entropy
from tests.unit.test_gated_mlp import MLP

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)])


def close(got: list[torch.Tensor], expected: list[torch.Tensor], bound: float) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours.float().cpu() - theirs).norm() <= bound * theirs.norm()


@DTYPES
@pytest.mark.parametrize("inner", [96, 171])
def test_gated_mlp(inner: int, dtype: torch.dtype, bound: float) -> None:
    pytest.importorskip("liger_kernel")
    torch.manual_seed(0)
    mlp, x = MLP(64, inner, True), torch.randn(300, 64)
    results = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        module = copy.deepcopy(mlp).to(device, kind)
        value = x.detach().clone().to(device, kind).requires_grad_()
        out = module(value) if device == "cpu" else gated_mlp(module, value)
        out.float().sin().sum().backward()
        results.append([out.detach(), value.grad, *(p.grad for p in module.parameters())])
    close(results[1], results[0], bound)


@DTYPES
@pytest.mark.parametrize("block", [1, 1 << 27])
def test_linear_cross_entropy(block: int, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(700, 64).bfloat16().float(), torch.randn(1030, 64).bfloat16().float() * 0.3
    targets = torch.randint(0, 1030, (700,))
    hidden.requires_grad_(), weight.requires_grad_()
    losses = F.cross_entropy(hidden @ weight.t(), targets, reduction="none")
    losses.sum().backward()
    ours = [x.detach().to("cuda", dtype).requires_grad_() for x in (hidden, weight)]
    got = linear_cross_entropy(*ours, targets.cuda(), 0, None, block)
    got.sum().backward()
    close([got.detach(), *(x.grad for x in ours)], [losses.detach(), hidden.grad, weight.grad], bound)


@DTYPES
@pytest.mark.parametrize("width", [64, 80])
def test_rotation_of_vision_towers(width: int, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    angles = torch.randn(200, width // 2).repeat(1, 2)
    query, key, other = (torch.randn(200, 4, width) for _ in range(3))
    results = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        leaves = [x.detach().clone().to(device, kind).requires_grad_() for x in (query, key)]
        out = rotated(*leaves, angles.cos().to(device), angles.sin().to(device))
        sum((x.float() * other.to(device)).sum() for x in out).backward()
        results.append([*(x.detach() for x in out), *(leaf.grad for leaf in leaves)])
    close(results[1], results[0], bound)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize(
    ("lengths", "width"), [((64, 16, 48, 1), 80), ((7, 12, 3), 20), ((64,) * 3, 128), ((1, 2), 64)]
)
def test_window_attention(lengths: tuple[int, ...], width: int, joint: bool) -> None:
    pytest.importorskip("liger_kernel")
    torch.manual_seed(0)
    heads, tokens = 3, sum(lengths)
    angles = (3 * torch.randn(tokens, width // 2)).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    parts = [torch.randn(tokens, n * heads * width) for n in ((3,) if joint else (1, 1, 1))]
    parts = [part.bfloat16().float().requires_grad_() for part in parts]
    other = torch.randn(tokens, heads * width).bfloat16().float()

    three = [x.unflatten(1, (heads, width)) for x in (parts[0].chunk(3, dim=1) if joint else parts)]
    query, key = rotated(three[0], three[1], cos, sin)
    windows = zip(*(x.split(lengths) for x in (query, key, three[2])), strict=True)
    expected = torch.cat(
        [
            F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in window)).transpose(0, 1).flatten(1)
            for window in windows
        ]
    )
    expected.backward(other)

    ours = [part.detach().to("cuda", torch.bfloat16).requires_grad_() for part in parts]
    packing = Packing.of(lengths, "cuda")
    assert can_attend(ours[0], packing, width)
    out = window_attention(ours, heads, cos.cuda(), sin.cuda(), packing)
    out.backward(other.to("cuda", torch.bfloat16))
    close([out.detach(), *(x.grad for x in ours)], [expected.detach(), *(x.grad for x in parts)], 1e-2)


@DTYPES
@pytest.mark.parametrize("shape", [(50_000, 1153), (50_000, 64), (1, 8), (0, 16)])
def test_sums_of_rows(shape: tuple[int, int], dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    gradient = (3 * torch.randn(shape)).bfloat16().float()
    close([bias_gradient(gradient.to("cuda", dtype))], [gradient.double().sum(0)], bound / 5)
