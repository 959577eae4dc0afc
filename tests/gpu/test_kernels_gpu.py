"""Fused functions on a CUDA device, against the plain ones on the CPU in fp32."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.activation_gradients import activation_backward, gated_backward
from models.fused import rotated
from models.gated_mlp import gated_mlp
from models.masks import Packing
from models.norms import can_norm, norm
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


@DTYPES
@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer", "layer without a bias"])
@pytest.mark.parametrize("shape", [(3001, 1152), (2, 700, 3, 128), (33, 5120), (5, 16384), (5, 20), (0, 7)])
def test_norms(shape: tuple[int, ...], kind: str, passes: bool, dtype: torch.dtype, bound: float) -> None:
    pytest.importorskip("liger_kernel")
    torch.manual_seed(0)
    width, centred = shape[-1], kind != "rms"
    tensors = [torch.randn(shape) + 0.5, 1 + torch.randn(width) / 4]
    tensors += [torch.randn(width)] if kind == "layer" else []
    x, weight, *bias = (tensor.bfloat16().float().requires_grad_() for tensor in tensors)
    others = [torch.randn(shape).bfloat16() for _ in range(1 + passes)]

    ours = [leaf.detach().to("cuda", dtype).requires_grad_() for leaf in (x, weight, *bias)]
    assert can_norm(ours[0], ours[1])
    got = norm(ours[0], ours[1], ours[2] if bias else None, 1e-5, centred, passes)
    got = got if passes else (got,)
    torch.autograd.backward(got, [other.to("cuda", dtype) for other in others])

    expected = F.layer_norm(x, (width,), weight, *bias) if centred else F.rms_norm(x, (width,), weight, 1e-5)
    expected = (expected, x * 1) if passes else (expected,)
    torch.autograd.backward(expected, [other.float() for other in others])
    close([out.detach() for out in got], [out.detach() for out in expected], bound / 4)
    close([leaf.grad for leaf in ours], [leaf.grad for leaf in (x, weight, *bias)], bound / 4)


def test_norms_of_views() -> None:
    """Rows that do not stand side by side, and a backward pass in two parts."""
    pytest.importorskip("liger_kernel")
    torch.manual_seed(0)
    x, weight = torch.randn(40, 96), torch.ones(64)
    results = []
    for device in ("cpu", "cuda"):
        leaf = x.detach().to(device).requires_grad_()
        rows, scale = leaf[:, 16:80], weight.to(device)
        if device == "cuda":
            normed, passed = norm(rows, scale, None, 1e-6, False, passes=True)
        else:
            normed, passed = F.rms_norm(rows, (64,), scale, 1e-6), rows
        normed[::2].t().cos().sum().backward(retain_graph=True)
        first = leaf.grad.clone()
        passed.sin().sum().backward()
        results.append([first.cpu(), leaf.grad.cpu()])
    close(results[1], results[0], 1e-5)


@DTYPES
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("shape", [(3001, 1153), (500, 4304), (3, 8), (0, 16)])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_backward_of_gelu(
    approximate: str, shape: tuple[int, int], sums: bool, dtype: torch.dtype, bound: float
) -> None:
    pytest.importorskip("liger_kernel")
    torch.manual_seed(0)
    between, gradient = (2 * torch.randn(shape).bfloat16().float() for _ in range(2))
    between.requires_grad_()
    activation = nn.GELU(approximate)
    active = activation(between)
    active.backward(gradient)
    expected = [active.detach(), between.grad] + ([between.grad.sum(0)] if sums else [])
    tensors = [x.detach().to("cuda", dtype) for x in (between, gradient)]
    *got, total = activation_backward(activation, *tensors, sums)
    assert (total is not None) == sums
    assert got[0].data_ptr() == tensors[1].data_ptr()  # by the kernel
    close([*got, total] if sums else got, expected, bound / 4)


@DTYPES
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("shape", [(3001, 1153), (500, 3424), (3, 8), (0, 16)])
def test_backward_of_gated_products(
    shape: tuple[int, int], sums: bool, dtype: torch.dtype, bound: float
) -> None:
    torch.manual_seed(0)
    gate, up, gradient = (2 * torch.randn(shape).bfloat16().float() for _ in range(3))
    leaves = gate.requires_grad_(), up.requires_grad_()
    product = F.silu(gate) * up
    product.backward(gradient)
    grads = [leaf.grad for leaf in leaves]
    expected = [product.detach(), *grads] + ([grad.sum(0) for grad in grads] if sums else [])
    got = gated_backward(*(x.detach().to("cuda", dtype) for x in (gate, up, gradient)), sums)
    assert all((x is not None) == sums for x in got[3:])
    close([x for x in got if x is not None], expected, bound / 4)
