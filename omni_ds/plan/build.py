"""config -> Plan (once) -> StepPlan (each step): the two functions, and the types they make."""

from __future__ import annotations

from omni_ds.errors import UserError
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.llm_meta import LLMMeta, check_expert_degree
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.partition import cut_stages
from omni_ds.plan.plan import Plan, PlanOptions, ReplicaPlan, StepPlan
from omni_ds.plan.step import build_step
from omni_ds.plan.tensor_rules import check_tensor_degree

__all__ = ["Plan", "PlanOptions", "ReplicaPlan", "StepPlan", "build_plan", "build_step", "stage_ranges"]

PLACEMENTS = ("colocated", "first_stage")


def build_plan(llm: LLMMeta, encoders: tuple[EncoderMeta, ...], mesh: Mesh, options: PlanOptions) -> Plan:
    """The static plan: layers cut into stages by cost, embedding and head counted.

    UserError: degrees that the LLM cannot be cut by, an unknown placement or stage, or nothing to train.
    """
    if options.placement not in PLACEMENTS:
        raise UserError(
            f"omni.encoder_parallel.placement {options.placement!r}: use one of {', '.join(PLACEMENTS)}"
        )
    if options.encoder_zero_stage not in (1, 2, 3):
        raise UserError(f"omni.encoder_parallel.zero_stage {options.encoder_zero_stage}: use 1, 2 or 3")
    size = options.group_size or mesh.data
    if mesh.data % size:
        legal = [d for d in range(1, mesh.data + 1) if mesh.data % d == 0]
        nearest = sorted(sorted(legal, key=lambda d: (abs(d - size), d))[:2])
        raise UserError(
            f"omni.balance.group_size {size} does not divide the {mesh.data} data-parallel replicas; the "
            f"nearest that do: {' or '.join(map(str, nearest))}"
        )
    if mesh.pipe > llm.layers:
        raise UserError(
            f"pipeline.stages {mesh.pipe}: the LLM has {llm.layers} decoder layers and every stage needs "
            f"one; use at most {llm.layers}"
        )
    check_tensor_degree(llm, mesh.tensor)
    check_expert_degree(llm.experts, mesh.expert)
    if not llm.trainable and not any(meta.trainable for meta in encoders):
        raise UserError("nothing to train: the LLM and every encoder and projector are frozen; unfreeze one")
    return Plan(mesh, llm, tuple(encoders), options, stage_ranges(llm, mesh.pipe, options))


def stage_ranges(llm: LLMMeta, stages: int, options: PlanOptions) -> tuple[tuple[int, int], ...]:
    """Layer ranges that minimise the dearest stage on a full micro-batch of documents of 1/8 of the budget.

    Half of the tokens count as targets: data decide the true share, and the head costs nothing for the
    others. The embedding is a look-up without FLOPs, but its gradient is as wide as the hidden states of a
    layer: it counts as an eighth of a layer so that equal stages leave the first one the smaller part.
    options.first_stage_work comes on top of it, for as many tokens.
    """
    budget = max(8, options.max_tokens_per_micro_batch)
    layer = llm.layer_flops((budget // 8,) * 8) * (2 + llm.trainable + options.recompute)
    head = llm.head_flops(budget // 2) * (2 + llm.trainable)
    encoders = budget // 8 * 8 * options.first_stage_work
    return cut_stages(layer, llm.layers, layer // 8 + encoders, head, stages)
