"""Unequal shares, the search, costs and the printed plan."""

import random

import pytest
from unit.plan_cases import plan_of, random_samples

from omni_ds.errors import UserError
from omni_ds.plan.base import LLMWork, time_line
from omni_ds.plan.build import build_step
from omni_ds.plan.capacity import Idle, share_targets, split
from omni_ds.plan.fill import EncoderWork
from omni_ds.plan.llm_meta import LLMMeta, check_expert_degree
from omni_ds.plan.partition import karmarkar_karp
from omni_ds.plan.render import format_plan
from omni_ds.plan.schedule import joint
from omni_ds.plan.shares import cut_windows, deal_windows
from omni_ds.plan.tune import UNIT, Shape, from_log_step, log_step, measure_items, tune, window_sizes


def test_idle_time_before_and_after():
    idle = Idle([10, 30], [20, 40], 50)  # idle 0-10, 20-30, 40-50
    assert [idle.before(t) for t in (0, 5, 10, 15, 25, 30, 45, 50)] == [0, 5, 10, 10, 15, 20, 25, 30]
    assert idle.after(25) == 15


def test_split_uses_room_first_and_pauses_least():
    assert split([10, 0], [10, 10], 2000, 8) == [8, 0]
    # no room for backwards on stage 0, which are twice as long: stage 1 takes the rest, then both pause
    row = split([10, 10], [0, 10], 2000, 10)
    assert sum(row) == 10 and row[1] == 10
    assert split([0, 0, 0], None, 0, 9) == [3, 3, 3]


@pytest.mark.parametrize("percent", [5, 30, 300])
def test_targets_add_up(percent):
    llm, windows, forward = _step(4, 16, percent)
    targets = share_targets(llm, time_line(llm), windows, forward, [2 * f for f in forward])
    assert [sum(row) for row in targets] == forward
    assert min(share for row in targets for share in row) >= 0


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("part", [0, 1, 10])
def test_backwards_of_next_to_nothing(stages, part):
    """A small projector behind a frozen tower: its backward pass is less than a thousandth of the forward."""
    llm, windows, forward = _step(stages, 16, 30_000)
    backward = [part * f // 10_000 for f in forward]
    assert (backward[0] > 0) == (part > 0)
    targets = share_targets(llm, time_line(llm), windows, forward, backward)
    assert [sum(row) for row in targets] == forward


def test_early_windows_go_to_late_stages_and_that_is_faster():
    llm, windows, forward = _step(8, 32, 30)
    targets = share_targets(llm, time_line(llm), windows, forward, [2 * f for f in forward])
    assert targets[1][7] > targets[1][0]  # stage 0 has no idle time before its second forward
    unequal = EncoderWork(
        windows, tuple(map(tuple, targets)), tuple(tuple(2 * c for c in row) for row in targets)
    )
    even = EncoderWork(windows, ((30,) * 8,) * 32, ((60,) * 8,) * 32)
    fastest = [
        min(joint(llm, work, live=64, overflow=overflow).length for overflow in (0, 500, 10**6))
        for work in (unequal, even)
    ]
    assert fastest[0] < 0.99 * fastest[1]


def _step(stages, count, percent):
    """Even LLM work, and per window of one micro-batch the encoder forward cost over all stages."""
    llm = LLMWork(((100,) * count,) * stages, ((200,) * count,) * stages)
    return llm, cut_windows(count, 1), [percent * stages] * count


def test_dealing_carries_over_what_a_rank_got_too_much_of():
    rng = random.Random(3)
    windows = [[int(100 * rng.lognormvariate(0, 1)) + 1 for _ in range(5)] for _ in range(40)]
    loads = [0] * 4
    for window, parts in zip(windows, deal_windows(windows, 4), strict=True):
        assert sorted(i for part in parts for i in part) == list(range(5))
        for rank, part in enumerate(parts):
            loads[rank] += sum(window[i] for i in part)
    assert max(loads) - min(loads) <= max(map(max, windows))
    assert deal_windows([[], [4]], 2)[0] == ((), ())


def test_log_steps():
    assert log_step(2, 1) == 12 and log_step(1, 2) == -12 and log_step(3, 3) == 0 and log_step(0, 5) == -96
    for step in (-96, -5, 0, 7, 12, 40):
        assert abs(log_step(from_log_step(step), UNIT) - step) <= 1


def test_search_hides_small_encoders_and_respects_the_live_bound():
    shape = Shape(
        stages=4,
        micro_batches=16,
        encode=log_step(4, 10),
        encode_back=log_step(8, 10),
        items=0,
        spread=0,
        ranks=1,
        live=16,
        training=True,
    )
    best = tune(shape)[0]
    assert best.live * best.window <= 16 + 4
    assert tune(shape) is tune(shape)  # remembered
    assert window_sizes(4, 16) == (1, 2, 4, 8, 16) and window_sizes(4, 3) == (1, 2, 3)
    assert measure_items([[5, 5, 5], [5]]) == (2, 0)
    assert measure_items([[]]) == (1, 0)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_equal_those_of_transformers(family, tied):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=96,
        head_dim=16,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    meta = LLMMeta.from_config(config.to_dict())
    assert meta.parameters == sum(p.numel() for p in model.parameters())
    assert meta.layer_parameters == sum(p.numel() for p in model.model.layers[0].parameters())
    # a matrix multiply-add is two FLOPs; attention adds the causal half of scores and values
    matrices = sum(p.numel() for n, p in model.model.layers[0].named_parameters() if p.dim() == 2)
    assert meta.layer_flops((10, 6)) == 2 * matrices * 16 + 2 * meta.heads * meta.head_dim * (100 + 36)
    assert meta.head_flops(5) == 2 * 32 * 96 * 5


@pytest.mark.parametrize(
    ("family", "sizes", "active"),
    [
        ("mixtral", {"num_local_experts": 6, "intermediate_size": 48}, {0, 1, 2, 3}),
        ("qwen3_moe", {"num_experts": 6, "decoder_sparse_step": 2}, {1, 3}),
        ("qwen3_moe", {"num_experts": 6, "mlp_only_layers": [1, 2], "attention_bias": True}, {0, 3}),
    ],
)
def test_experts_are_held_whole_and_computed_in_part(family, sizes, active):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    own = {"moe_intermediate_size": 24, "intermediate_size": 40} if family == "qwen3_moe" else {}
    config = AutoConfig.for_model(family, vocab_size=96, num_experts_per_tok=2, **common, **own, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    meta = LLMMeta.from_config(config.to_dict())
    assert (
        LLMMeta.from_config(
            {**common, **own, **sizes} | {"model_type": family, "vocab_size": 96} | {"num_experts_per_tok": 2}
        )
        == meta
    )
    assert meta.parameters == sum(p.numel() for p in model.parameters())
    assert (meta.experts, meta.experts_per_token, set(meta.moe_layers)) == (6, 2, active)
    for index, layer in enumerate(model.model.layers):
        held = {name: p for name, p in layer.named_parameters()}
        assert meta.parameters_of_layer(index) == sum(p.numel() for p in held.values())
        experts = sum(p.numel() for name, p in held.items() if ".experts." in name)
        assert meta.expert_parameters_of_layer(index) == experts
        assert bool(experts) == (index in active)
        met = sum(p.numel() for p in held.values() if p.dim() == 2) + experts * 2 // 6
        assert meta.layer_flops((10, 6), index) - 2 * met * 16 == 2 * meta.heads * meta.head_dim * (100 + 36)
    mean = sum(meta.parameters_of_layer(i) for i in range(4)) // 4
    assert meta.layer_parameters == mean


def test_more_choices_than_experts_are_refused():
    config = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config |= {"model_type": "mixtral", "vocab_size": 96, "num_local_experts": 2, "num_experts_per_tok": 3}
    with pytest.raises(UserError, match="num_experts_per_tok is 3, but there are 2 experts"):
        LLMMeta.from_config(config)


def test_expert_degrees_that_cannot_work_are_refused():
    check_expert_degree(0, 1), check_expert_degree(4, 2)
    with pytest.raises(UserError, match="3 ranks do not divide the 4 experts of a layer; use one of 1, 2, 4"):
        check_expert_degree(4, 3)
    with pytest.raises(UserError, match="2, but the LLM has no experts; use 1"):
        check_expert_degree(0, 2)


def test_sliding_window_attention_costs_a_band():
    config = {
        "model_type": "mistral",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 96,
        "sliding_window": 4,
    }
    meta = LLMMeta.from_config(config)
    pairs = sum(min(i + 1, 4) for i in range(100))
    band = meta.layer_flops((100,)) - 2 * meta.layer_matrices * 100
    assert abs(band - 4 * 32 * pairs) <= 4 * 32 * 100  # scores and values, up to the diagonal's half


def test_windows_count_in_the_layers_that_have_them():
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 96}
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = sizes | {"model_type": "gemma3_text", "num_hidden_layers": 6, "head_dim": 8, "sliding_window": 4}
    meta = LLMMeta.from_config(config | {"layer_types": kinds})
    layers = [meta.layer_flops((100, 3), index) for index in range(6)]
    assert meta.full_layers == (5,) and len(set(layers[:5])) == 1
    assert layers[5] == 2 * meta.layer_matrices * 103 + 2 * 32 * (100**2 + 9)
    assert layers[5] > layers[0]
    assert abs(6 * meta.layer_flops((100, 3)) - sum(layers)) < 6
    # scores and values of one more layer without window, for the sample of 100 tokens
    difference = meta.sample_flops(100, 0) - LLMMeta.from_config(config).sample_flops(100, 0)
    assert abs(difference - (layers[5] - layers[0])) < 12


def test_printed_plan_names_everything():
    plan = plan_of(2, 2, towers=False)
    step = build_step(plan, 0, random_samples(plan, 24, 0))
    text = format_plan(plan, step)
    assert (
        "4 ranks = pipe 2 x data 2" in text
        and "decoder layers 0-3" in text
        and "norm and head (tied)" in text
    )
    assert "encoder image" in text and "trains projector" in text and f"{step.hash:016x}" in text
    assert max(map(len, text.splitlines())) <= 162
    # every action of every rank of the replica is in the second grid
    for rank in (0, 2):
        row = " ".join(
            line.split(" | ")[1] for line in text.splitlines() if line.startswith(f"rank {rank} |")
        )
        assert row.split() == [str(a) for a in step.actions(rank)]


@pytest.mark.parametrize("count", [1, 3, 8, 30])
def test_few_ranks_get_the_same_items_as_from_the_heap(count):
    rng = random.Random(count)
    costs = [[rng.randint(1, 9) for _ in range(count)] for _ in range(12)]
    rooms = [[rng.randint(0, 4) for _ in range(8)] for _ in costs]
    dealt = deal_windows(costs, 8, rooms, exact=False)
    carry = [0] * 8
    for window, row, parts in zip(costs, rooms, dealt, strict=True):
        room = [part * sum(window) // sum(row) + c for part, c in zip(row, carry, strict=True)]
        assert parts == karmarkar_karp(window, 8, capacities=room, exact=False)
        carry = [r - sum(window[i] for i in part) for r, part in zip(room, parts, strict=True)]


@pytest.mark.parametrize("window", [0, 100])
def test_flops_of_a_sample_are_those_of_layers_and_head(window):
    llm = LLMMeta(64, 3, 4, 2, 16, 128, 1000, False, True, window=window)
    for tokens in (1, 99, 100, 101, 500):
        assert llm.sample_flops(tokens, 7) == 3 * llm.layer_flops((tokens,)) + llm.head_flops(7)
