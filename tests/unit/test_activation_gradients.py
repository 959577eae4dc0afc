"""Which activations have a kernel, and what the kernels' in-place writes forbid."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from models import activation_gradients
from models.activation_gradients import _approximation
from tests.unit.test_gated_mlp import MLP


def test_which_activations_are_torchs_gelu() -> None:
    x = torch.randn(64)
    found = {name: _approximation(ACT2FN[name]) for name in ACT2FN if name != "xielu"}
    for name, approximation in found.items():
        if approximation is not None:
            gelu = nn.functional.gelu(x, approximate=approximation)
            torch.testing.assert_close(ACT2FN[name](x), gelu, rtol=0, atol=0)
    assert found["gelu"] == "none" and found["gelu_pytorch_tanh"] == "tanh"
    assert found["quick_gelu"] is None and found["silu"] is None and found["gelu_10"] is None


def test_what_only_holds_a_gelu_is_none() -> None:
    class Scaled(nn.GELU):
        def forward(self, x):
            return 2 * super().forward(x)

    held = Scaled()
    held.act = nn.functional.gelu
    assert _approximation(held) is None
    assert _approximation(nn.GELU("tanh")) == "tanh" and _approximation(nn.functional.gelu) == "none"


def test_a_graph_whose_tensors_were_written_over_is_not_walked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from models.gated_mlp import gated_mlp

    def launch(kernel, tensors, count, sums):
        for tensor in tensors:
            tensor.data.zero_()  # unseen by autograd, as what a Triton kernel writes
        return [None] * count

    kernels = SimpleNamespace(gated_backward=None)
    monkeypatch.setitem(sys.modules, "models.activation_kernels", kernels)
    monkeypatch.setattr(activation_gradients, "take_kernels", lambda *tensors: True)
    monkeypatch.setattr(activation_gradients, "_launch", launch)
    x = torch.randn(3, 16, requires_grad=True)
    out = gated_mlp(MLP(16, 24, bias=False), x).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
