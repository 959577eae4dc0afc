"""Attention over sequence shards equals the same layers on one process: outputs and every gradient."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig

from models.attention import omni_attention
from models.llm import build_llm_layers
from models.masks import MaskSpec, Packing
from models.packed import PackedBatch, StageState, pad, shard
from omni_ds.parallel.layer_groups import LayerGroups
from omni_ds.parallel.ulysses import Ulysses
from omni_ds.plan.shards import even_bounds, padding_tokens, sequence_bounds
from tests.ranks import run_ranks
from tests.unit.model_helpers import llm_config, packed_batch

PRIME = (9, 5, 1, 9, 23, 6)  # 53 tokens
BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-13}  # fp64 shows that fp32 differs by rounding only
worst = dict.fromkeys(BOUNDS, 0.0)


@dataclass(frozen=True)
class Case:
    """A decoder on some samples; heads: (query, key-value)."""

    name: str
    heads: tuple[int, int]
    lengths: tuple[int, ...] = PRIME
    recompute: bool = False
    dtype: torch.dtype = torch.float64

    def config(self):
        query, key = self.heads
        return AutoConfig.for_model(
            **llm_config(
                self.name,
                num_attention_heads=query,
                num_key_value_heads=key,
                head_dim=8,
                hidden_size=self.hidden_size,
            )
        )

    @property
    def hidden_size(self) -> int:
        return 4 * self.heads[0]  # Llama wants a multiple of the heads


HEADS = [(4, 2), (3, 1), (4, 1), (2, 1), (2, 2), (6, 3), (6, 2), (5, 5)]
CASES = [
    *(Case("qwen3", heads) for heads in HEADS),
    *(Case(name, heads) for name, heads in product(["llama", "mistral-sliding"], [(4, 2), (3, 1)])),
    *(Case("qwen3", (4, 2), lengths) for lengths in [(1,), (2,), (1, 1), (3,), (7,), (2, 17)]),
    Case("qwen2-sliding-half", (6, 3), (40, 3)),
    *(Case("qwen3", heads, recompute=True) for heads in [(4, 2), (2, 1)]),
    Case("mistral-sliding", (3, 1), (2,), recompute=True),
    *(Case(name, (6, 3), dtype=torch.float32) for name in ["llama", "mistral-sliding", "qwen3"]),
    Case("qwen3", (2, 1), recompute=True, dtype=torch.float32),
]


def assert_close(ours: Tensor, expected: Tensor, what: str, scale: float = 1.0) -> None:
    """Equal, relative to the largest element or to ``scale`` where that is larger."""
    assert ours.shape == expected.shape, f"{what}: {ours.shape}, expected {expected.shape}"
    scale, difference = max(scale, expected.abs().max().item()), (ours - expected).abs().max().item()
    bound = BOUNDS[expected.dtype] * scale
    assert difference <= bound, f"{what}: differs by {difference}, the scale is {scale}"
    worst[expected.dtype] = max(worst[expected.dtype], difference / scale)


class _Norm(nn.Module):
    """RMSNorm in the dtype of its input, where HF's rounds to fp32."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)


def layers_of(case: Case, groups: LayerGroups) -> list[nn.Module]:
    torch.manual_seed(0)
    definitions = build_llm_layers(case.config(), recompute=case.recompute, groups=groups)
    layers = [definition.build().train().to(case.dtype) for definition in definitions[1:-2]]
    for module in [module for layer in layers for module in layer.modules()]:
        for name, child in module.named_children():
            if case.dtype == torch.float64 and hasattr(child, "variance_epsilon"):
                setattr(module, name, _Norm(child))
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return layers


def forward(layers: list[nn.Module], batch: PackedBatch, hidden: Tensor) -> Tensor:
    state = StageState(batch, hidden)
    for layer in layers:
        state = layer(state)
    return state.hidden


def gather(local: Tensor, bounds: tuple[int, ...], group) -> Tensor:
    """Shards [T_s, ...] of all ranks -> [T, ...]."""
    whole = local.new_zeros(bounds[-1], *local.shape[1:])
    first = bounds[dist.get_rank(group)]
    whole[first : first + local.shape[0]] = local
    dist.all_reduce(whole, group=group)
    return whole


def inputs(case: Case) -> tuple[Tensor, Tensor]:
    """Hidden states [T, H] of the whole batch, and the gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    shape = (sum(case.lengths), case.hidden_size)
    hidden, gradient = (torch.randn(shape, dtype=case.dtype, generator=generator) for _ in range(2))
    return hidden, gradient


def decoder(case: Case, group) -> None:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    batch = packed_batch(case.lengths, vocab=61)
    hidden, gradient = inputs(case)
    tokens, what = batch.tokens, f"{case} on {ranks} ranks"

    reference, whole = layers_of(case, LayerGroups()), hidden.clone().requires_grad_()
    expected = forward(reference, batch, whole)
    expected.backward(gradient)

    bounds = sequence_bounds(tokens, ranks, False)
    padded = pad(batch, padding_tokens(tokens, ranks, False))
    mine = slice(bounds[rank], bounds[rank + 1])
    extra = hidden.new_zeros(padded.padding, case.hidden_size)
    layers, local = layers_of(case, LayerGroups(sequence=group)), torch.cat([hidden, extra + 0.5])[mine]
    local = local.clone().requires_grad_()
    out = forward(layers, shard(padded, bounds, rank), local)
    out.backward(torch.cat([gradient, extra])[mine])

    assert_close(gather(out.detach(), bounds, group)[:tokens], expected, f"{what}: output")
    assert_close(gather(local.grad, bounds, group)[:tokens], whole.grad, f"{what}: input gradient")
    for index, (layer, twin) in enumerate(zip(layers, reference, strict=True)):
        # Gradients of queries are sums that cancel, so their rounding is that of the layer's larger ones.
        scale = max(parameter.grad.abs().max().item() for parameter in twin.parameters())
        for (name, parameter), other in zip(layer.named_parameters(), twin.parameters(), strict=True):
            dist.all_reduce(parameter.grad, group=group)
            assert_close(parameter.grad, other.grad, f"{what}: layer {index}, {name}", scale)


def frozen_decoder(case: Case, group) -> None:
    """Only the last shard's hidden states need a gradient, which comes from all shards."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    batch = packed_batch(case.lengths, vocab=61)
    hidden, gradient = inputs(case)
    bounds = even_bounds(batch.tokens, ranks)
    mine = slice(bounds[rank], bounds[rank + 1])

    reference, whole = layers_of(case, LayerGroups()), hidden.clone().requires_grad_()
    forward(reference, batch, whole).backward(gradient)

    layers, local = layers_of(case, LayerGroups(sequence=group)), hidden[mine].clone()
    for layer in layers:
        layer.requires_grad_(False)
    local.requires_grad_(rank == ranks - 1)
    out = forward(layers, shard(batch, bounds, rank), local)
    assert out.requires_grad
    out.backward(gradient[mine])
    if rank == ranks - 1:
        assert_close(local.grad, whole.grad[mine], f"frozen {case} on {ranks} ranks")
    with torch.no_grad():
        assert not forward(layers, shard(batch, bounds, rank), local).requires_grad


@dataclass(frozen=True)
class Kernel:
    """Attention alone, as an encoder with long segments calls it, in fp64 (HF's norms round to fp32)."""

    heads: tuple[int, int]  # of queries, of keys and values
    mask: MaskSpec
    bounds: tuple[int, ...] | None = None
    value_size: int = 8


def kernels(ranks: int) -> list[Kernel]:
    full, causal = MaskSpec(), MaskSpec(causal=True)
    shares = [(3, 3), (6, 2), (2, 1), (10, 5)]
    gaps = (0, 0, *([7] * (ranks - 2)), 53)  # the first shard is empty, and all but the second and the last
    return [
        *(Kernel(share, mask) for share, mask in product(shares, [full, causal])),
        Kernel((4, 2), full, value_size=5),
        Kernel((4, 4), full, bounds=gaps),
        Kernel((4, 2), MaskSpec(causal=True, window=3), bounds=gaps),
    ]


def attention(kernel: Kernel, group) -> None:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    bounds = kernel.bounds or even_bounds(sum(PRIME), ranks)
    generator = torch.Generator().manual_seed(2)
    heads, kv_heads = kernel.heads

    def random(count: int, size: int) -> Tensor:
        return torch.randn(1, count, bounds[-1], size, dtype=torch.float64, generator=generator)

    whole = [random(heads, 8), random(kv_heads, 8), random(kv_heads, kernel.value_size)]
    gradient = random(heads, kernel.value_size).transpose(1, 2)
    mine = slice(bounds[rank], bounds[rank + 1])

    twins = [x.clone().requires_grad_() for x in whole]
    spread = [twins[0], *(x.repeat_interleave(heads // kv_heads, dim=1) for x in twins[1:])]
    packing = Packing.of(PRIME, "cpu", kernel.mask)
    expected, _ = omni_attention(nn.Module(), *spread, packing)
    expected.backward(gradient)

    local = [x[:, :, mine].clone().requires_grad_() for x in whole]
    cut = Packing(packing.cu_seqlens, PRIME, kernel.mask, Ulysses(group, bounds))
    out, _ = omni_attention(nn.Module(), *local, cut)
    out.backward(gradient[:, mine])

    what = f"{kernel} on {ranks} ranks"
    assert_close(gather(out.detach()[0], bounds, group), expected[0], f"{what}: output")
    for name, ours, theirs in zip(("query", "key", "value"), local, twins, strict=True):
        gathered = gather(ours.grad[0].transpose(0, 1), bounds, group)
        assert_close(gathered, theirs.grad[0].transpose(0, 1), f"{what}: gradient of {name}")


def check_all() -> dict[torch.dtype, float]:
    group = dist.new_group(list(range(dist.get_world_size())))
    for case in CASES:
        decoder(case, group)
    for recompute in (False, True):
        frozen_decoder(Case("qwen3", (2, 1), recompute=recompute), group)
    for kernel in kernels(dist.get_world_size()):
        attention(kernel, group)
    return worst


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_equals_one_process(ranks: int) -> None:
    for rank, found in enumerate(run_ranks(check_all, ranks)):
        print(f"rank {rank}: largest relative difference {found}")
        assert all(found[dtype] <= bound for dtype, bound in BOUNDS.items())
