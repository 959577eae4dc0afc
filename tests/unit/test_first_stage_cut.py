"""Layers cut with the encoders' work counted on the first stage."""

from __future__ import annotations

from plan_cases import llm, plan_of, random_samples

from omni_ds.plan.build import PlanOptions, stage_ranges
from omni_ds.plan.cost import encoder_work_per_token


def test_default_changes_nothing_and_work_moves_layers() -> None:
    model = llm(layers=16, tied=True)
    budget = PlanOptions(max_tokens_per_micro_batch=256)
    even = stage_ranges(model, 4, budget)
    layer = 3 * model.layer_flops((32,) * 8) // 256  # forward and backward of a token
    sizes = []
    for layers in (0, 1, 2, 8):
        options = PlanOptions(max_tokens_per_micro_batch=256, first_stage_work=layers * layer)
        ranges = stage_ranges(model, 4, options)
        assert ranges[0][0] == 0 and ranges[-1][1] == 16
        sizes.append(ranges[0][1])
        if layers == 0:
            assert ranges == even
    assert sizes[0] > sizes[1] >= sizes[2] > sizes[3] == 1, sizes


def test_work_is_what_items_cost_over_tokens() -> None:
    plan = plan_of(2)
    samples = random_samples(plan, 32, 5)
    encoders = {meta.name: meta for meta in plan.encoders}
    total = sum(encoders[item.encoder].item_cost(item) for sample in samples for item in sample.items)
    assert total
    tokens = sum(sample.tokens for sample in samples)
    assert encoder_work_per_token(plan.encoders, samples) == total // tokens
    assert encoder_work_per_token(plan.encoders, ()) == 0
