"""The gated MLP as one function against the module it stands for."""

import copy

import pytest
import torch
from torch import nn

from models.gated_mlp import can_fuse, gated_mlp


class MLP(nn.Module):
    def __init__(self, width: int, inner: int, bias: bool):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(inner, width, bias), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inner", [16, 13])  # the other is padded
@pytest.mark.parametrize("frozen", [(), ("up_proj.weight", "gate_proj.bias"), ("down_proj.weight",)])
def test_results_and_gradients(inner: int, bias: bool, frozen: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    mlp, x = MLP(6, inner, bias).double(), torch.randn(2, 5, 6, dtype=torch.float64)
    for name in frozen:
        if name in dict(mlp.named_parameters()):
            mlp.get_parameter(name).requires_grad_(False)
    other = copy.deepcopy(mlp)
    results = []
    for module, run in ((mlp, mlp), (other, lambda value: gated_mlp(other, value))):
        value = x.clone().requires_grad_()
        out = run(value)
        out.sin().sum().backward()
        results.append([out, value.grad, *(p.grad for p in module.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_only_plain_linears_are_fused() -> None:
    mlp = MLP(6, 8, False)
    assert can_fuse(mlp)
    mlp.up_proj = nn.Sequential(mlp.up_proj)
    assert not can_fuse(mlp)
