"""How long segments are batched and hidden padding, with torch's own attention in the place of cuDNN's."""

import pytest
import torch
import torch.nn.functional as F

import models.cudnn_attention as cudnn
from models.attention import _run_sdpa
from models.masks import MaskSpec, Packing


def kernel(query, key, value, causal, scale):
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("segments", [(3, 40, 17, 33, 5, 40, 39), (40, 64), (3, 2), (16,)])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_the_packed_kernel(monkeypatch: pytest.MonkeyPatch, causal: bool, segments) -> None:
    monkeypatch.setattr(cudnn, "LONG", 16)
    monkeypatch.setattr(cudnn, "_kernel", kernel)
    torch.manual_seed(0)
    packing, results = Packing.of(segments, "cpu", MaskSpec(causal=causal)), []
    heads = [torch.randn(sum(segments), n, 8, dtype=torch.float64) for n in (4, 2, 2)]
    for run in (_run_sdpa, lambda *args: cudnn.attend(*args, _run_sdpa)):
        leaves = [x.clone().requires_grad_() for x in heads]
        out = run(*leaves, packing, 0.3)
        out.sin().sum().backward()
        results.append([out, *(x.grad for x in leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_few_lengths_and_little_padding() -> None:
    lengths = {cudnn.padded_length(n) for n in range(1024, 16385)}
    assert len(lengths) == 4 * cudnn.STEPS + 1
    assert all(n <= cudnn.padded_length(n) <= n * (1 + 1 / cudnn.STEPS) for n in range(1024, 16385))
    assert cudnn.padded_length(2048) == 2048
