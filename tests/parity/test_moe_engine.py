"""Experts under DeepSpeed's optimizers: gradient scale, one norm, clipping and weights as in one process."""

from __future__ import annotations

import copy

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param

from omni_ds.engine.optimizer_adapter import adapt
from omni_ds.engine.optimizers import PartParameters
from omni_ds.parallel.expert import (
    PART_KEY,
    is_expert,
    part_name,
    register_expert_groups,
    split_expert_groups,
)
from tests.parity.moe_support import (
    Sharded,
    assert_close,
    batches,
    expert_groups,
    hf_loss,
    hf_model,
    moe_config,
)
from tests.ranks import run_ranks

STEPS, CLIP, LR, EPS = 3, 0.3, 1e-3, 1e-4


def _reference(name: str, world: int, rounded: bool):
    """(model after the steps, model before, norms): all documents in one process, clipped AdamW in fp32, from
    weights that are bf16 numbers where ``rounded``."""
    start = hf_model(moe_config(name))
    if rounded:
        start.bfloat16().float()
    model = copy.deepcopy(start)
    model.lm_head.weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    decay = [p for p in trained if p.dim() >= 2]
    groups = [
        {"params": decay, "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer, norms = torch.optim.AdamW(groups, lr=LR, eps=EPS), []
    for step in range(STEPS):
        data = batches(world, seed=step)
        targets = sum(len(batch.target_ids) for batch in data)
        sum(loss + penalty for loss, penalty in (hf_loss(model, batch) for batch in data)).div(
            targets
        ).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return model, start, norms


def _train(name: str, expert: int, bf16: bool, own_step: bool, stage: int = 1) -> dict[str, float]:
    """Largest errors of norms and weights; with ``own_step`` DeepSpeed clips and steps by itself."""
    world, rank = dist.get_world_size(), dist.get_rank()
    after, before, norms = _reference(name, world, bf16)
    groups = expert_groups(world, expert)
    register_expert_groups(groups)
    model = Sharded(before, groups, recompute=True)
    part = PartParameters("llm", LR, tuple(model.parameters()))
    optimizer = torch.optim.AdamW(split_expert_groups(part.groups(0.1)), lr=LR, eps=EPS)
    assert {part_name(group) for group in optimizer.param_groups} == {"llm", "llm (no decay)"}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if bf16:
        settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        settings |= {"communication_data_type": "fp32"}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    assert type(engine.optimizer).__name__ == ("BF16_Optimizer" if bf16 else "DeepSpeedZeroOptimizer")
    errors = {"norm": 0.0, "weight": 0.0, "update": 0.0}
    for step in range(STEPS):
        data = batches(world, seed=step)
        targets = sum(len(batch.target_ids) for batch in data)
        loss, _ = engine(data[rank])
        engine.backward(loss * world / targets)
        adapter = adapt(engine.optimizer)
        if own_step:
            engine.step()
            norm = float(engine.get_global_grad_norm())
        else:
            norm = float(adapter.squared_norm() ** 0.5)
            adapter.step(norm, CLIP)
            engine.micro_steps += 1
        errors["norm"] = max(errors["norm"], abs(norm - norms[step]) / norms[step])
    wanted = {f"llm.{n}": p.detach() for n, p in after.named_parameters()}
    start = {f"llm.{n}": p.detach() for n, p in before.named_parameters()}
    distance = moved = 0.0
    for held in model.held():
        ours, index = safe_get_full_fp32_param(held.parameter), held.region.index
        expected = wanted[held.name][index]
        if not bf16:
            errors["weight"] = max(errors["weight"], assert_close(ours, expected, held.name))
        moved += (expected - start[held.name][index]).square().sum()
        distance += (ours - expected).square().sum()
    errors["update"] = float((distance / moved) ** 0.5)
    return errors


@pytest.mark.parametrize(
    ("name", "world", "expert", "own_step", "stage"),
    [
        ("mixtral", 2, 2, True, 1),
        ("qwen3-moe-mixed", 4, 2, True, 1),
        ("mixtral", 4, 2, False, 1),
        ("mixtral", 4, 2, False, 2),
        ("qwen3-moe-mixed", 4, 4, False, 1),
    ],
)
def test_fp32_equals_one_process(name: str, world: int, expert: int, own_step: bool, stage: int) -> None:
    for errors in run_ranks(_train, world, name, expert, False, own_step, stage):
        assert errors["norm"] <= 1e-5, errors
        assert errors["update"] <= 1e-4, errors  # relative to the update itself


@pytest.mark.parametrize(("name", "world", "expert"), [("mixtral", 2, 2), ("qwen3-moe-mixed", 4, 2)])
def test_bf16_optimizer_follows_one_process(name: str, world: int, expert: int) -> None:
    for errors in run_ranks(_train, world, name, expert, True, False):
        assert errors["norm"] <= 0.03 and errors["update"] <= 0.1, errors


def test_groups_are_split_without_a_loss() -> None:
    dense, expert = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2, 2))
    expert.allreduce, expert.group_name = False, "ep_size_2"
    given = [
        {"params": [dense, expert], "lr": 0.5, "weight_decay": 0.1, "name": "llm"},
        {
            "params": [torch.nn.Parameter(torch.ones(2))],
            "lr": 0.5,
            "weight_decay": 0.0,
            "name": "llm (no decay)",
        },
    ]
    split = split_expert_groups(given)
    assert [group["name"] for group in split] == ["llm", "llm (no decay)", "ep_size_2"]
    assert split[2]["params"] == [expert] and split[2]["moe"] and split[2][PART_KEY] == "llm"
    assert [part_name(group) for group in split] == ["llm", "llm (no decay)", "llm"]
    assert is_expert(expert) and not is_expert(dense)
    assert given[0]["params"] == [dense, expert]
    assert all(group["lr"] == 0.5 for group in split) and split[2]["weight_decay"] == 0.1
