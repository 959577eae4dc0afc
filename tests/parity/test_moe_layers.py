"""Experts on forked ranks and the routers' losses, against HF's blocks on each document alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import deepspeed.module_inject.auto_ep_layer  # noqa: F401  imported once, before ranks are forked
import pytest
import torch
import torch.distributed as dist

from models.documents import Documents
from models.init import assign
from models.moe import RouterPenalty, build_moe, configure_experts, expert_load, router_losses
from models.packed import PackedBatch
from omni_ds.parallel.layer_groups import LayerGroups
from tests.parity.moe_support import (
    CASES,
    Sharded,
    assert_close,
    batches,
    expert_groups,
    hf_loss,
    hf_model,
    hf_penalty,
    moe_config,
    summed_gradient,
)
from tests.ranks import run_ranks
from tests.unit.model_helpers import packed_batch


def _whole_stack(name: str, expert: int, recompute: bool) -> tuple[float, bool]:
    """(largest relative difference of a gradient, whether some expert had no token here)."""
    world, rank = dist.get_world_size(), dist.get_rank()
    reference, data = hf_model(moe_config(name)), batches(world)
    groups = expert_groups(world, expert)
    expected = [hf_loss(reference, batch) for batch in data]
    torch.stack([loss + penalty for loss, penalty in expected]).sum().backward()
    model = Sharded(reference, groups, recompute).train()
    loss, state = model(data[rank])
    torch.testing.assert_close(loss, expected[rank][0] + expected[rank][1], rtol=1e-5, atol=0)
    torch.testing.assert_close(state.auxiliary, expected[rank][1], rtol=1e-5, atol=0)
    assert all(
        count.sum() == data[rank].tokens * reference.config.num_experts_per_tok
        for count in state.router_counts
    )
    loss.backward()
    wanted = {f"llm.{n}": p.grad for n, p in reference.named_parameters()}
    worst = 0.0
    for held in model.held():
        ours = summed_gradient(held, groups)
        worst = max(worst, assert_close(ours, wanted[held.name][held.region.index], held.name))
    return worst, any(bool((count == 0).any()) for count in state.router_counts)


@pytest.mark.parametrize(
    ("name", "world", "expert", "recompute"),
    [
        ("mixtral", 1, 1, True),
        ("qwen3-moe-mixed", 1, 1, False),
        ("mixtral", 2, 2, False),
        ("mixtral", 4, 4, True),
        ("mixtral", 4, 2, False),
        ("qwen3-moe-mixed", 2, 2, True),
        ("qwen3-moe-mixed", 4, 2, True),
        ("qwen3-moe-mixed", 4, 4, False),
    ],
)
def test_gradients_equal_hf(name: str, world: int, expert: int, recompute: bool) -> None:
    results = run_ranks(_whole_stack, world, name, expert, recompute)
    if name != "mixtral":
        assert any(empty for _, empty in results), "no expert went without a token: an easy case"


def _shards(name: str, favoured: tuple[int, ...]) -> list[list[int]]:
    """One block on documents cut over two ranks that also share its experts; returns the counts."""
    rank = dist.get_rank()
    groups = expert_groups(2, expert=2, sequence=2)
    config = moe_config(
        name, **({"num_experts_per_tok": 2, "norm_topk_prob": True} if name != "mixtral" else {})
    )
    configure_experts(config)
    index = config.num_hidden_layers - 1
    block = hf_model(config).model.layers[index].mlp
    segments, padding = (6, 9, 3), 3  # the cut at 9 lies inside the second document, padding is the third
    x = torch.randn(18, config.hidden_size, generator=torch.Generator().manual_seed(3))
    if favoured:  # a feature that is 1 everywhere, for which only these experts have a weight that is high
        x[:, 0] = 1.0
        with torch.no_grad():
            block.gate.weight[:, 0] = -30.0
            block.gate.weight[list(favoured), 0] = 30.0
    twin = x.clone().requires_grad_()
    layers = sum(
        i not in (getattr(config, "mlp_only_layers", None) or ()) for i in range(config.num_hidden_layers)
    )
    outputs, penalties, start = [], [], 0
    for number, length in enumerate(segments):
        document = twin[start : start + length][None]
        outputs.append(block(document)[0])
        if number < 2:
            penalties.append(hf_penalty(config, [block.gate(document)[0]]) / layers)
        start += length
    weight = torch.randn(18, config.hidden_size, generator=torch.Generator().manual_seed(4))
    weight[15:] = 0.0
    expected, penalty = torch.cat(outputs), torch.stack(penalties).sum()
    ((expected * weight).sum() + penalty).backward()

    with torch.device("meta"):
        meta = type(block)(config)
    moe, ours = build_moe(config, index, meta, groups)
    whole = {f"llm.model.layers.{index}.mlp.{n}": p for n, p in block.named_parameters()}
    regions = moe.regions()
    for local, full in moe.hf_names().items():
        value = whole[full].detach()
        assign(ours, local, value[regions[local].index] if local in regions else value)
    rows = slice(9 * rank, 9 * rank + 9)
    batch = packed_batch(segments, vocab=61)
    batch = replace(batch, input_ids=batch.input_ids[rows], bounds=(0, 9, 18), padding=padding)
    shard = x[rows].clone().requires_grad_()
    with moe.logits(ours) as logits:
        out = ours(shard[None])[0]
    auxiliary, counts = moe.observe(logits[0], batch)
    assert_close(out, expected[rows], "output")
    value = auxiliary.detach().clone()
    dist.all_reduce(value)
    torch.testing.assert_close(value, penalty.detach(), rtol=1e-5, atol=0)
    ((out * weight[rows]).sum() + auxiliary).backward()
    assert_close(shard.grad, twin.grad[rows], "input gradient")
    router = ours.router.gate.weight.grad.clone()
    dist.all_reduce(router)
    assert_close(router, block.gate.weight.grad, "router")
    for local, region in regions.items():
        gradient = ours.get_parameter(local).grad
        gradient = torch.zeros(region.local_shape) if gradient is None else gradient
        assert_close(gradient, whole[moe.hf_names()[local]].grad[region.index], local)
    assert counts.sum() == config.num_experts_per_tok * (9 if rank == 0 else 6)
    return counts.tolist()


@pytest.mark.parametrize(
    ("name", "favoured"), [("mixtral", ()), ("qwen3-moe-mixed", ()), ("mixtral", (0, 1)), ("mixtral", (2, 3))]
)
def test_documents_cut_over_ranks(name: str, favoured: tuple[int, ...]) -> None:
    counts = torch.tensor(run_ranks(_shards, 2, name, favoured))
    if favoured:  # the other rank of the two received no token at all
        assert counts.sum(0).nonzero().flatten().tolist() == list(favoured)


def _documents(segments: tuple[int, ...], padding: int = 0, lost: tuple[int, ...] = ()) -> Documents:
    edges = torch.tensor([0, *segments], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    batch = packed_batch((sum(segments),), vocab=61)
    batch = replace(batch, cu_seqlens=edges, segments=segments, padding=padding, lost=lost)
    return Documents.of(batch, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_do_not_depend_on_the_packing(dtype: torch.dtype) -> None:
    config = moe_config("qwen3-moe-mixed")
    penalty = RouterPenalty.of(config)
    logits = torch.randn(17, 12).to(dtype)
    whole, counts = router_losses(logits, _documents((9, 1, 7)), penalty)
    parts = [
        router_losses(logits[rows], _documents((rows.stop - rows.start,)), penalty)
        for rows in (slice(0, 9), slice(9, 10), slice(10, 17))
    ]
    torch.testing.assert_close(whole, torch.stack([loss for loss, _ in parts]).sum())
    assert torch.equal(counts, torch.stack([count for _, count in parts]).sum(0))
    padded, same = router_losses(torch.cat([logits, logits[:4]]), _documents((9, 1, 7, 4), 4), penalty)
    torch.testing.assert_close(padded, whole)
    assert torch.equal(same, counts)


def test_a_document_without_tokens_costs_nothing() -> None:
    penalty = RouterPenalty(4, 2, 0.1, 0.1)
    logits = torch.randn(5, 4, requires_grad=True)
    loss, _ = router_losses(logits, _documents((2, 0, 3)), penalty)
    torch.testing.assert_close(loss, router_losses(logits, _documents((2, 3)), penalty)[0])
    loss.backward()
    assert logits.grad.isfinite().all()


def test_a_lost_document_changes_nothing() -> None:
    penalty = RouterPenalty(4, 2, 0.1, 0.1)
    logits = torch.randn(12, 4, requires_grad=True)
    loss, counts = router_losses(logits, _documents((3, 5, 4), lost=(1,)), penalty)
    loss.backward()
    assert not logits.grad[3:8].any() and logits.grad[:3].any() and logits.grad[8:].any()
    kept = torch.cat([logits[:3], logits[8:]]).detach().requires_grad_()
    expected, same = router_losses(kept, _documents((3, 4)), penalty)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.cat([logits.grad[:3], logits.grad[8:]]), kept.grad)
    assert torch.equal(counts, same)


def test_switches_of_the_losses() -> None:
    assert RouterPenalty.of(moe_config("mixtral", penalty=False)) == RouterPenalty(4, 2, 0.0, 0.0)
    assert RouterPenalty.of(moe_config("mixtral")) == RouterPenalty(4, 2, 0.2 / 2, 0.0)
    assert RouterPenalty.of(moe_config("qwen3-moe-mixed")) == RouterPenalty(12, 3, 0.2 / 2, 0.05 / 2)
    loss, counts = router_losses(torch.randn(5, 4), _documents((5,)), RouterPenalty(4, 2, 0.0, 0.0))
    assert loss is None and counts.sum() == 10


def test_evaluation_has_neither_losses_nor_counts() -> None:
    model = Sharded(hf_model(moe_config("mixtral")), LayerGroups()).eval()
    _, state = model(packed_batch((5, 3), vocab=61))
    assert state.auxiliary is None and state.router_counts == ()


def test_expert_load_is_the_worst_layers_maximum_over_mean() -> None:
    assert expert_load([torch.tensor([4, 4, 4]), torch.tensor([0, 9, 0])]) == pytest.approx(3.0)
    assert expert_load([]) == 1.0


def _bf16(name: str) -> tuple[float, float]:
    """Relative differences to HF's loss in fp32: of ours in bf16 on two ranks, of HF's own in bf16."""
    rank, groups = dist.get_rank(), expert_groups(2, expert=2)
    config = moe_config(name)
    reference, data = hf_model(config), batches(2)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16().float())
    model = Sharded(reference, groups).bfloat16()
    low = copy.deepcopy(reference).bfloat16()
    low.model.rotary_emb.inv_freq = reference.model.rotary_emb.inv_freq.clone()
    batch: PackedBatch = data[rank]
    loss, _ = model(batch)
    exact, own = (sum(hf_loss(which, batch)) for which in (reference, low))
    assert loss.dtype == torch.float32
    return abs(loss.item() - exact.item()) / exact.item(), abs(own.item() - exact.item()) / exact.item()


@pytest.mark.parametrize("name", list(CASES))
def test_bf16_is_as_close_as_hf_in_bf16(name: str) -> None:
    for ours, hf in run_ranks(_bf16, 2, name):
        assert ours <= max(2 * hf, 2**-9), (ours, hf)  # at least a rounding to bf16
