"""Bytes of weights, gradients and optimizer state on a rank. Activations are not counted.

A trained parameter needs, with bf16 weights: 2 weight + 4 gradient accumulated in fp32 + 4 master + 8 Adam
moments = 18 bytes; in fp32: 4 weight + 4 gradient + 8 moments = 16. ZeRO-1 splits master and moments over
the group, ZeRO-2 gradients too, ZeRO-3 everything. The LLM runs its stage over the data axis, encoders
theirs over the world. A frozen parameter is its weight alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from omni_ds.plan.plan import Plan


@dataclass(frozen=True)
class Bytes:
    weight: int
    gradient: int
    state: int


BF16 = Bytes(weight=2, gradient=4, state=12)
FP32 = Bytes(weight=4, gradient=4, state=8)


def state_bytes(parameters: int, trained: bool, zero_stage: int, group: int, sizes: Bytes) -> int:
    """Bytes one rank of a ZeRO group holds of `parameters`."""
    weight = parameters * sizes.weight
    if zero_stage == 3:
        weight = -(-weight // group)
    if not trained:
        return weight
    gradient, state = parameters * sizes.gradient, parameters * sizes.state
    if zero_stage >= 2:
        gradient = -(-gradient // group)
    if zero_stage >= 1:
        state = -(-state // group)
    return weight + gradient + state


def stage_parameters(plan: Plan, stage: int) -> int:
    """LLM parameters a rank of this stage holds; a tied matrix is held by the first and the last stage."""
    start, stop = plan.stages[stage]
    last = plan.mesh.pipe - 1
    held = (stop - start) * plan.llm.layer_parameters
    if stage == 0:
        held += plan.llm.embedding_parameters
    if stage == last:
        shared = plan.llm.tied and last == 0
        held += plan.llm.head_parameters - (plan.llm.embedding_parameters if shared else 0)
    return held


def encoder_parameters(plan: Plan, stage: int) -> tuple[int, int]:
    """(trained, frozen) parameters of the encoders and projectors a rank of this stage holds."""
    trained = frozen = 0
    if plan.first_stage_only and stage > 0:
        return 0, 0
    for meta in plan.encoders:
        for count, trains in (
            (meta.tower_parameters, meta.tower_trainable),
            (meta.projector_parameters, meta.projector_trainable),
        ):
            trained, frozen = (trained + count, frozen) if trains else (trained, frozen + count)
    return trained, frozen


def rank_bytes(plan: Plan, stage: int, sizes: Bytes) -> int:
    """Bytes on a rank of this stage: its part of the LLM and all encoders."""
    mesh = plan.mesh
    held, zero = stage_parameters(plan, stage), plan.options.llm_zero_stage
    llm = state_bytes(held, plan.llm.trainable, zero, mesh.data_degree, sizes)
    trained, frozen = encoder_parameters(plan, stage)
    sharers = mesh.data_degree * mesh.tensor if plan.first_stage_only else mesh.world_size
    zero = plan.options.encoder_zero_stage if plan.encoders_trainable else 0
    return (
        llm
        + state_bytes(trained, True, zero, sharers, sizes)
        + state_bytes(frozen, False, zero, sharers, sizes)
    )
