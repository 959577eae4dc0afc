"""Predicted memory against sums by hand, parameter counts of transformers, and what autograd saves."""

from dataclasses import replace

import pytest
from unit.plan_cases import plan_of, random_samples

from omni_ds.plan.activations import Load, activations, layer_bytes
from omni_ds.plan.build import build_step
from omni_ds.plan.held import LayerShare, held_by_stage, layer_held
from omni_ds.plan.llm_meta import LLMMeta
from omni_ds.plan.memory import (
    BF16,
    FP32,
    Numerics,
    encoder_parameters,
    rank_memory,
    stage_parameters,
    states,
)
from omni_ds.plan.memory_table import memory_line, memory_table
from omni_ds.plan.mesh import Mesh

SMALL = Numerics(bf16=False, fused=False, reduce_bucket=10)
LOAD = Load(micro_batches=8, tokens=256, targets=100)


def everything(found, phase: str) -> int:
    always = found.weights + found.sums + found.optimizer
    return always + (found.gradients + getattr(found, phase) if phase else 0)


@pytest.mark.parametrize(
    ("zero", "group", "between", "stepping"),
    [
        (0, 4, 4 + 8, 4 + 8 + 4),
        (1, 1, 4 + 12, 4 + 12 + 8 + 8),
        (1, 4, 4 + 12 / 4, 4 + 12 / 4 + 8 / 4 + 8 / 4),
        (2, 4, 4 + 16 / 4, 4 + 16 / 4 + 4 / 4 + 8 / 4),
        (3, 4, 20 / 4, 20 / 4 + 4 / 4 + 8 / 4),
    ],
)
def test_bytes_of_a_parameter_in_fp32(zero, group, between, stepping):
    found = states(1000, zero, group, SMALL)
    assert everything(found, "") == 1000 * between
    assert everything(found, "stepping") == 1000 * stepping


@pytest.mark.parametrize(
    ("zero", "group", "between"), [(1, 1, 18), (1, 4, 6 + 3), (2, 4, 2 + 4), (3, 4, 4.5)]
)
def test_bytes_of_a_parameter_in_bf16(zero, group, between):
    found = states(1000, zero, group, BF16)
    assert everything(found, "") == 1000 * between
    assert found.gradients == 0
    assert states(1000, zero, group, replace(BF16, at_once=False)).gradients == (2000 if zero < 2 else 0)


def test_frozen_and_offloaded_parameters():
    assert everything(states(1000, 1, 4, BF16, trained=False), "") == 2000
    assert everything(states(1000, 3, 4, BF16, trained=False), "") == 500
    assert everything(states(1000, 3, 4, BF16, trained=False, sharded=False), "") == 2000
    host = states(1000, 1, 4, replace(BF16, offload_optimizer=True))
    assert (host.optimizer, host.host) == (0, 3000)
    both = states(1000, 3, 4, replace(BF16, offload_optimizer=True, offload_param=True))
    assert (everything(both, ""), both.host) == (0, 4500)


def test_stages_hold_every_parameter_once_and_a_tied_matrix_twice():
    plan = plan_of(2, 2, towers=False)
    held = sum(stage_parameters(plan, s) for s in (0, 1))
    assert held == plan.llm.parameters + plan.llm.embedding_parameters
    alone = plan_of(1, 2, towers=False)
    assert stage_parameters(alone, 0) == alone.llm.parameters
    trained, frozen = encoder_parameters(plan, 0)
    assert trained == sum(m.projector_parameters for m in plan.encoders)
    assert frozen == sum(m.tower_parameters for m in plan.encoders)


@pytest.mark.parametrize("tensor", [1, 2, 3, 4])
def test_tensor_ranks_hold_what_a_count_on_meta_says(tensor):
    """Row and column splits of HF's parameters; norms whole; key-value heads copied beyond their number."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=50,
        vocab_size=97,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    llm = LLMMeta.from_config(config.to_dict())
    # of the first rank: query heads, key-value heads, MLP channels, vocabulary rows
    heads, kv, inner, rows = {1: (4, 2, 50, 97), 2: (2, 1, 25, 49), 3: (1, 1, 17, 33), 4: (1, 1, 13, 25)}[
        tensor
    ]
    share = LayerShare.of(llm, tensor)
    assert (share.heads, share.kv_heads, share.inner) == (heads, kv, inner)
    split = {"q_proj": 8 * heads * 32, "o_proj": 8 * heads * 32, "k_proj": 8 * kv * 32, "v_proj": 8 * kv * 32}
    split |= {"gate_proj": inner * 32, "up_proj": inner * 32, "down_proj": inner * 32}
    split |= {"embed_tokens": rows * 32, "lm_head": rows * 32}
    counted = sum(split.get(name.split(".")[-2], p.numel()) for name, p in model.named_parameters())
    assert held_by_stage(llm, Mesh(1, 1, 1, tensor), ((0, 2),), 0).dense == counted


def test_experts_are_dealt_and_copied_over_tensor_ranks():
    llm = LLMMeta(
        32,
        2,
        4,
        2,
        8,
        40,
        96,
        False,
        True,
        experts=8,
        experts_per_token=2,
        moe_intermediate=24,
        moe_layers=(1,),
    )
    whole = layer_held(llm, 1, 1, 1)
    assert whole.total == llm.parameters_of_layer(1) and whole.experts == 8 * 3 * 32 * 24
    assert layer_held(llm, 0, 1, 1).total == llm.parameters_of_layer(0)
    assert layer_held(llm, 1, 2, 4).experts == whole.experts // 4
    mesh = Mesh(1, 4, 1, 1, 4)
    assert held_by_stage(llm, mesh, ((0, 2),), 0).experts == whole.experts // 4


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_saves_what_is_predicted(model_type, dtype):
    """Distinct tensors that autograd keeps of one decoder layer, on documents of one length (no padding)."""
    import torch
    from transformers import AutoConfig

    from models.llm import build_llm_layers
    from models.packed import PackedBatch, StageState

    config = AutoConfig.for_model(
        model_type,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=160,
        vocab_size=96,
    )
    layer = build_llm_layers(config)[1].build().to(getattr(torch, dtype)).train()
    tokens, documents = 512, 4
    length = tokens // documents
    positions = torch.arange(length).repeat(documents)
    empty = torch.zeros(0, dtype=torch.int64)
    batch = PackedBatch(
        input_ids=positions,
        position_ids=positions,
        cu_seqlens=torch.arange(0, tokens + 1, length, dtype=torch.int32),
        max_seqlen=length,
        segments=(length,) * documents,
        target_positions=empty,
        target_ids=empty,
        sample_of_target=empty,
    )
    saved, own = {}, {p.untyped_storage().data_ptr() for p in layer.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    hidden = torch.randn(tokens, 64, dtype=getattr(torch, dtype), requires_grad=True)
    state = StageState(batch, hidden)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(state)
    rotary = {t.untyped_storage().data_ptr() for pair in state.rotary.values() for t in pair}
    measured = sum(storage.nbytes() for at, storage in saved.items() if at not in rotary)
    llm = LLMMeta.from_config(config.to_dict())
    element = 4 if dtype == "float32" else 2
    predicted = tokens * layer_bytes(llm, 0, 1, element, False)
    assert predicted == pytest.approx(measured, rel=0.08)


def test_activations_fall_with_every_axis():
    def saved(pipe, stage, **axes):
        return activations(plan_of(pipe, 1, encoders=False, **axes), stage, LOAD, 2, fused=True)

    whole = saved(1, 0)
    assert whole.live == 1 and whole.steady
    assert saved(2, 0).live == 2 and saved(2, 1).live == 1
    assert saved(2, 1).saved < whole.saved
    assert saved(1, 0, sequence=2).saved == pytest.approx(whole.saved / 2, rel=0.01)
    assert whole.saved / 2 < saved(1, 0, tensor=2).saved < whole.saved  # norms are whole on each rank
    recomputed = saved(1, 0, recompute=True)
    assert recomputed.saved < whole.saved / 4 and recomputed.working > whole.working


def test_peak_is_that_of_the_largest_phase():
    plan = plan_of(2, 2)
    step = build_step(plan, 0, random_samples(plan, 24, 0))
    load = Load.of(step)
    assert load.tokens == max(mb.tokens for r in step.replicas for mb in r.micro_batches)
    assert load.encoders["image"][0] > 0 and load.features > 0
    assert load.grown(10 * load.tokens).tokens == 10 * load.tokens and load.grown(1) == load
    memory = rank_memory(plan, 0, load, SMALL)
    assert memory.peak == max(memory.computing, memory.reducing, memory.stepping)
    assert memory.computing >= memory.resident + memory.states.gradients
    few = replace(load, micro_batches=1)
    assert rank_memory(plan, 0, few, SMALL).computing < memory.computing


def test_zero_and_data_ranks_share():
    peaks = [
        rank_memory(plan_of(1, data, encoders=False, llm_zero_stage=zero), 0, LOAD, SMALL).resident
        for zero, data in ((1, 1), (1, 2), (1, 4), (2, 4), (3, 4))
    ]
    assert peaks[0] > peaks[1] > peaks[2] and peaks[4] < peaks[2]


def test_table_has_a_line_for_each_stage():
    plan = plan_of(2, 2, towers=False)
    table = memory_table(plan, LOAD, replace(FP32, offload_optimizer=True))
    assert len(table.splitlines()) == 5 and "on the host" in table and "fp32, ZeRO-1" in table
    assert "for micro-batches of 256 tokens" in memory_line(plan, BF16)
