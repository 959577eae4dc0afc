"""A step as other systems would order it, for comparison."""

from __future__ import annotations

from dataclasses import replace

from omni_ds.plan.actions import Action, Kind
from omni_ds.plan.base import forward_only, one_f_one_b
from omni_ds.plan.build import Plan, StepPlan
from omni_ds.plan.cost import EncoderCost
from omni_ds.plan.fill import Schedule
from omni_ds.plan.shares import deal_windows


def encoders_first(plan: Plan, step: StepPlan) -> StepPlan:
    """The same micro-batches with all encoding, dealt evenly to the ranks, before the pipeline and all of its
    backward after it: one window that holds every micro-batch."""
    cost = EncoderCost(plan.encoders, plan.options.encoder_recompute)
    members = (tuple(range(step.micro_batches)),)
    passes = (tuple(meta.name for meta in plan.encoders if meta.trainable),)
    base = forward_only if step.forward_only else one_f_one_b
    trains = plan.encoders_trainable and not step.forward_only
    before = (Action(Kind.EF, 0),)
    after = (Action(Kind.EB, 0),) if trains else ()
    stages = tuple(
        (*before, *(Action(Kind.B if back else Kind.F, m) for back, m in program), *after)
        for program in base(plan.mesh.pipe, step.micro_batches)
    )
    replicas = tuple(
        replace(
            replica,
            members=members,
            passes=passes,
            parts=tuple(
                deal_windows(
                    [[cost.total(i) for mb in replica.micro_batches for s in mb.samples for i in s.items]],
                    len(replica.ranks),
                )
            ),
            schedule=Schedule(stages, ((),) * len(stages), 1),
            live=1,
            _lowered={},
        )
        for replica in step.replicas
    )
    return replace(step, replicas=replicas)
