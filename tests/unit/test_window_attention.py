"""Where vision towers take the kernel for short windows, and what they hand to it.

What it computes is tested on a GPU (tests/gpu/test_kernels_gpu.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import window_attention
from models.encoders import qwen_vision
from models.fused import rotated
from models.masks import MaskSpec, Packing

HEADS, SIZE, LENGTHS = 2, 4, (6, 1, 5)


def plain(projected: Sequence[Tensor], heads: int, cos: Tensor, sin: Tensor, packing: Packing) -> Tensor:
    """What ``window_attention`` promises, window by window."""
    three = projected[0].chunk(3, dim=1) if len(projected) == 1 else projected
    query, key, value = (x.unflatten(1, (heads, -1)) for x in three)
    windows = zip(*(x.split(packing.segments) for x in (*rotated(query, key, cos, sin), value)), strict=True)
    outputs = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in window)).transpose(0, 1).flatten(1)
        for window in windows
    ]
    return torch.cat(outputs)


class Attention(nn.Module):
    """Of HF's Qwen2.5-VL (joint) or Qwen2.5-Omni, as far as ours reads it."""

    def __init__(self, joint: bool):
        super().__init__()
        width = HEADS * SIZE
        self.num_heads = HEADS
        for name, out in {"qkv": 3 * width}.items() if joint else dict.fromkeys("qkv", width).items():
            setattr(self, name, nn.Linear(5, out))
        self.proj = nn.Linear(width, 5)


@pytest.mark.parametrize("joint", [True, False])
def test_towers_hand_over_projections_and_angles(joint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    attention, calls = Attention(joint), []
    hidden = torch.randn(sum(LENGTHS), 5, requires_grad=True)
    angles = torch.randn(sum(LENGTHS), SIZE // 2).repeat(1, 2)
    packing, leaves = Packing.of(LENGTHS, "cpu"), [hidden, *attention.parameters()]

    def result() -> list[Tensor]:
        out = qwen_vision._attend(attention, hidden, packing, (angles.cos(), angles.sin()))
        return [out, *torch.autograd.grad(out.sin().sum(), leaves)]

    expected = result()
    monkeypatch.setattr(qwen_vision, "can_attend", lambda *args: calls.append(args) or True)
    monkeypatch.setattr(qwen_vision, "window_attention", plain)
    torch.testing.assert_close(result(), expected)
    assert calls == [(hidden, packing, SIZE)]


def test_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_attention, "has_liger", lambda: True)
    hidden = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    short = Packing.of([64, 3], "cpu")

    def takes(hidden: object = hidden, packing: Packing = short, size: int = 80) -> bool:
        return window_attention.can_attend(hidden, packing, size)

    assert takes() and takes(packing=Packing.of([], "cpu"))
    assert not takes(packing=Packing.of([3, 65], "cpu"))
    assert not takes(packing=short.with_mask(MaskSpec(causal=True)))
    assert not takes(packing=replace(short, ulysses=object()))
    assert not takes(SimpleNamespace(is_cuda=False, dtype=torch.bfloat16))
    assert not takes(SimpleNamespace(is_cuda=True, dtype=torch.float32))
    assert not takes(size=160)
    monkeypatch.setattr(window_attention, "has_liger", lambda: False)
    assert not takes()


def test_other_strides_are_refused() -> None:
    wide = torch.randn(sum(LENGTHS), 4 * HEADS * SIZE)[:, : 3 * HEADS * SIZE]
    angles = torch.randn(sum(LENGTHS), SIZE)
    with pytest.raises(AssertionError, match="read and written elsewhere"):
        window_attention.window_attention((wide,), HEADS, angles, angles, Packing.of(LENGTHS, "cpu"))
