"""Bytes that a rank holds, predicted from the plan: parameters and what training keeps for them.

A trained parameter on P parameters of a rank, D ranks in its ZeRO group. What DeepSpeed's optimizers hold
(read in 0.19.8, and measured by benchmarks/memory.py):

| | bf16, accumulation in fp32 | fp32 |
|---|---|---|
| weights | 2 P | 4 P |
| gradients | 4 P sums; 2 P more where they are not added to them at once | 4 P |
| optimizer | 4 P / D masters, 8 P / D Adam moments | the same; ZeRO-0 has no masters: 8 P |
| more while gradients are reduced | 6 of each of at most 5e8 elements | two buckets, 4 P / D copied |
| more while the optimizer steps | | 8 P / D gradients, 4 P fewer |

torch's AdamW that is not fused (on CPU) needs another 8 P / D in the step, of one flat tensor; without
sharding (ZeRO-0) it goes parameter by parameter. ZeRO-2 splits the sums of
gradients too and ZeRO-3 the weights; both then reduce through buckets during the backward pass. Offloading
moves masters and moments (and the sums), or ZeRO-3's weights, to the host.

The LLM's ZeRO group is the data and sequence ranks of its lane, for experts those with the same ones;
encoders have their own stage over the world. A frozen parameter is its weight alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from omni_ds.plan.activations import Activations, Load, activations
from omni_ds.plan.held import held_by_stage
from omni_ds.plan.plan import Plan

_ALL_REDUCE = 500_000_000  # elements that DeepSpeed's pipeline engine reduces at once in bf16
_PREFETCH = 50_000_000  # elements of weights that ZeRO-3 gathers ahead


@dataclass(frozen=True)
class Numerics:
    """How numbers are held.

    bf16: weights and activations in bf16 with fp32 masters and sums; else everything in fp32. fused: kernels
    of a GPU (AdamW in one pass; requirements-gpu.txt). reduce_bucket: elements that ZeRO
    reduces at once. offload_optimizer, offload_param: kept on the host. at_once: a gradient in bf16 joins its
    sum as soon as it is there.
    """

    bf16: bool = True
    fused: bool = True
    reduce_bucket: int = 500_000_000
    offload_optimizer: bool = False
    offload_param: bool = False
    at_once: bool = True

    @property
    def element(self) -> int:
        """Bytes of a weight or an activation."""
        return 2 if self.bf16 else 4


BF16 = Numerics()
FP32 = Numerics(bf16=False)


@dataclass(frozen=True)
class States:
    """Bytes of some parameters on one rank.

    weights, sums, optimizer: always there; gradients: from the first backward of a step to its end;
    reducing, stepping: what these two add to all of that (stepping may be negative); working: what a backward
    pass adds for its duration; host: in CPU memory.
    """

    weights: int = 0
    sums: int = 0
    gradients: int = 0
    optimizer: int = 0
    reducing: int = 0
    stepping: int = 0
    working: int = 0
    host: int = 0

    def __add__(self, other: States) -> States:
        """Both; one goes backward, is reduced and stepped after the other."""
        both = {name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__}
        one = {
            name: max(getattr(self, name), getattr(other, name))
            for name in ("reducing", "stepping", "working")
        }
        return States(**both | one)


def states(
    parameters: int,
    zero_stage: int,
    group: int,
    numerics: Numerics,
    *,
    trained: bool = True,
    sharded: bool = True,
) -> States:
    """What one rank of a ZeRO group of `group` ranks holds for `parameters`, its own and the others'.

    trained: False for frozen ones, of which ZeRO-3 shards the weights where they stand in the same engine
    (sharded) as something that trains.
    """
    element, part = numerics.element, -(-parameters // group)
    split = zero_stage == 3 and sharded
    weights = element * (part if split else parameters)
    on_host = weights if split and numerics.offload_param else 0
    if not trained or not parameters:
        return States(weights=weights - on_host, host=on_host)
    owned = part if zero_stage >= 1 else parameters
    temporary = 0 if numerics.fused else 8 * owned
    masters = 4 * owned if numerics.bf16 or zero_stage >= 1 else 0
    optimizer = masters + 8 * owned
    bucket = 4 * numerics.reduce_bucket
    if zero_stage >= 2:
        sums = 4 * part
        offloaded = optimizer + sums if numerics.offload_optimizer else 0
        gathered = 2 * element * min(parameters, _PREFETCH) if split else 0
        return States(
            weights=weights - on_host,
            sums=0 if offloaded else sums,
            optimizer=0 if offloaded else optimizer,
            stepping=0 if offloaded else 4 * part + temporary,
            working=numerics.element * numerics.reduce_bucket + gathered,
            host=on_host + offloaded,
        )
    if numerics.bf16:
        sums, working = 4 * parameters, 0
        gradients = 0 if numerics.at_once else 2 * parameters
        reducing, stepping = 6 * min(parameters, _ALL_REDUCE), temporary
    elif zero_stage == 1:
        sums, gradients, working = 0, 4 * parameters, bucket
        reducing = 2 * bucket + max(0, 4 * owned - min(gradients, bucket))
        stepping = 8 * owned - gradients + temporary
    else:
        sums, gradients, working = 0, 4 * parameters, 0
        reducing, stepping = 4 * min(parameters, _ALL_REDUCE), 0
    offloaded = optimizer if numerics.offload_optimizer else 0
    return States(
        weights=weights,
        sums=sums,
        gradients=gradients,
        optimizer=optimizer - offloaded,
        reducing=reducing,
        stepping=max(stepping, -gradients) if not offloaded else 0,
        working=working,
        host=offloaded,
    )


@dataclass(frozen=True)
class RankMemory:
    """Predicted bytes of one rank; `peak` is the largest of a step's three phases."""

    parameters: int
    states: States
    activations: Activations

    @property
    def weights(self) -> int:
        return self.states.weights

    @property
    def gradients(self) -> int:
        return self.states.sums + self.states.gradients

    @property
    def optimizer(self) -> int:
        return self.states.optimizer

    @property
    def resident(self) -> int:
        """Between two steps."""
        return self.states.weights + self.states.sums + self.states.optimizer

    @property
    def computing(self) -> int:
        """Forward and backward passes. Gradients and the activations of all live micro-batches meet only
        where a forward follows the first backward."""
        held, live = self.activations, self.activations.live
        steady = self.states.gradients + held.saved
        if not held.steady:
            steady = max(held.saved, self.states.gradients + held.saved * (live - 1) // max(1, live))
        return self.resident + self.states.working + steady + held.working

    @property
    def reducing(self) -> int:
        return self.resident + self.states.gradients + self.states.reducing

    @property
    def stepping(self) -> int:
        return self.resident + self.states.gradients + self.states.stepping

    @property
    def peak(self) -> int:
        return max(self.computing, self.reducing, self.stepping)

    @property
    def host(self) -> int:
        return self.states.host


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


def stage_parameters(plan: Plan, stage: int) -> int:
    """LLM parameters a rank of this stage holds; a tied matrix is held by the first and the last stage."""
    return held_by_stage(plan.llm, plan.mesh, plan.stages, stage).total


def llm_states(plan: Plan, stage: int, numerics: Numerics) -> States:
    """Of the LLM's part on a rank of this stage."""
    mesh, zero = plan.mesh, plan.options.llm_zero_stage
    held = held_by_stage(plan.llm, mesh, plan.stages, stage)
    trained = plan.llm.trainable
    dense = states(held.dense, zero, mesh.data_degree, numerics, trained=trained, sharded=trained)
    if not held.experts:
        return dense
    sharers = mesh.data_degree // mesh.expert
    return dense + states(held.experts, zero, sharers, numerics, trained=trained, sharded=trained)


def encoder_states(plan: Plan, stage: int, numerics: Numerics) -> States:
    """Of the encoders on a rank of this stage. Their gradients are reduced once a step, so that ZeRO-2
    shards nothing more than ZeRO-1."""
    trained, frozen = encoder_parameters(plan, stage)
    sharers = plan.mesh.data_degree * plan.mesh.tensor if plan.first_stage_only else plan.mesh.world_size
    zero = {2: 1}.get(plan.options.encoder_zero_stage, plan.options.encoder_zero_stage)
    alone = sum(m.tower_parameters + m.projector_parameters for m in plan.encoders if not m.trainable)
    alone = min(alone, frozen)  # encoders without anything to train are plain modules
    return (
        states(trained, zero, sharers, numerics)
        + states(frozen - alone, zero, sharers, numerics, trained=False)
        + states(alone, 0, 1, numerics, trained=False)
    )


def rank_memory(plan: Plan, stage: int, load: Load, numerics: Numerics) -> RankMemory:
    """Prediction for the ranks of a stage, of which the first of each axis holds most."""
    return RankMemory(
        stage_parameters(plan, stage) + sum(encoder_parameters(plan, stage)),
        llm_states(plan, stage, numerics) + encoder_states(plan, stage, numerics),
        activations(plan, stage, load, numerics.element, fused=numerics.fused),
    )


def largest(plan: Plan, load: Load, numerics: Numerics) -> RankMemory:
    """Of the stage that needs most."""
    return max((rank_memory(plan, s, load, numerics) for s in range(plan.mesh.pipe)), key=lambda m: m.peak)
