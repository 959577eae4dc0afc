"""Sums of weight gradients on a CUDA device: products in fp32, added where the sum is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.siglip.modeling_siglip import SiglipAttention

from models import fused
from models.attention import ATTENTION_NAME
from models.gated_mlp import gated_mlp
from models.masks import Packing
from omni_ds.engine.bf16_adapter import Bf16Adapter
from tests.unit.test_gated_mlp import MLP
from tests.unit.test_weight_gradient import of_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_sums_are_not_rounded_to_bf16() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 96, device="cuda", dtype=torch.bfloat16)
    adapter = Bf16Adapter(of_optimizer([linear.weight]))
    expected = torch.zeros(96, 64, dtype=torch.float64)
    for _ in range(3):
        x, gradient = (torch.randn(200, n, device="cuda").bfloat16() for n in (64, 96))
        fused._linear(linear, x).backward(gradient)
        expected += gradient.double().cpu().t() @ x.double().cpu()
    assert linear.weight.grad is None
    got = adapter.gradient(linear.weight).view(96, 64).double().cpu()
    assert (got - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("inner", [96, 171])
def test_gated_mlp(inner: int) -> None:
    pytest.importorskip("liger_kernel")
    torch.manual_seed(0)
    plain = MLP(64, inner, True)
    ours = copy.deepcopy(plain).to("cuda", torch.bfloat16)
    weights = {name: p for name, p in ours.named_parameters() if p.dim() == 2}
    adapter = Bf16Adapter(of_optimizer(list(weights.values())))
    for _ in range(2):
        x = torch.randn(300, 64)
        plain(x).sin().sum().backward()
        gated_mlp(ours, x.to("cuda", torch.bfloat16)).float().sin().sum().backward()
    for name, weight in weights.items():
        assert weight.grad is None
        expected = plain.get_parameter(name).grad
        got = adapter.gradient(weight).view(expected.shape).cpu()
        assert (got - expected).norm() <= 2e-2 * expected.norm()


def test_heads_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """SigLIP's heads of 72 numbers: its weights know fewer numbers of a head than the products do."""
    monkeypatch.setattr(fused, "kernel_head_dim", lambda *_: 96)
    torch.manual_seed(0)
    config = AutoConfig.for_model("siglip_vision_model", hidden_size=144, num_attention_heads=2)
    config._attn_implementation = ATTENTION_NAME
    plain = SiglipAttention(config).bfloat16().float()
    ours = copy.deepcopy(plain).to("cuda", torch.bfloat16)
    fused.fuse(plain)
    fused.fuse(ours)
    weights = {name: p for name, p in ours.named_parameters() if p.dim() == 2}
    adapter = Bf16Adapter(of_optimizer(list(weights.values())))
    for _ in range(2):
        x = torch.randn(1, 600, 144).bfloat16().float()
        for attention in (plain, ours):
            weight = attention.q_proj.weight
            packing = Packing.of((300, 257, 43), weight.device)
            rows, _ = attention(x.to(weight.device, weight.dtype), attention_mask=packing)
            rows.float().sin().sum().backward()
    for name, weight in weights.items():
        assert weight.grad is None
        expected = plain.get_parameter(name).grad
        got = adapter.gradient(weight).view(expected.shape).cpu()
        assert (got - expected).norm() <= 2e-2 * expected.norm()
    for name in ("q_proj", "v_proj", "out_proj"):  # that of k_proj is zero
        got, expected = (module.get_submodule(name).bias.grad.float().cpu() for module in (ours, plain))
        assert (got - expected).norm() <= 2e-2 * expected.norm()
