"""StepPlan: one global batch, decided from sample metadata alone.

Order of decisions: samples to micro-batches, window size (tune.py), items to ranks, schedule, transfers.
All replicas run one compute program, made from their average costs: they finish together anyway, it is
cheap, and encoder ZeRO-3 needs one order in the whole world.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from itertools import chain

from omni_ds.plan.actions import Kind
from omni_ds.plan.balance import as_given, long_share, ratio
from omni_ds.plan.batch import MicroBatch, assign
from omni_ds.plan.cost import EncoderCost, LLMCost, backward_factor, llm_work
from omni_ds.plan.long_short import split_images, split_recordings
from omni_ds.plan.plan import Plan, ReplicaPlan, StepPlan
from omni_ds.plan.retime import retime
from omni_ds.plan.sample import SampleMeta
from omni_ds.plan.times import TimeModel
from omni_ds.plan.weave import weave

FILL = 4  # micro-batches per stage where samples allow: the pipeline idles (P - 1) / (M + P - 1) of the time
_CODE = {kind: code for code, kind in enumerate(Kind)}


def build_step(
    plan: Plan,
    step: int,
    samples: Sequence[SampleMeta],
    *,
    forward_only: bool = False,
    times: TimeModel | None = None,
) -> StepPlan:
    """Plan one global batch. Deterministic: a function of its arguments alone, in integers.

    samples: of the whole global batch, in sampler order, each within the token budget. forward_only:
    evaluation. times: measured; they place actions, all else is decided on FLOPs. UserError when a fixed
    number of micro-batches cannot hold the batch.
    """
    cost = EncoderCost(plan.encoders, plan.options.encoder_recompute)
    ranks, long_short = plan.mesh.world_size, plan.options.long_short
    given = samples
    samples = split_recordings(samples, cost, ranks, long_short)
    samples = split_images(samples, cost, ranks, long_short, plan.largest_gang)
    bins = _micro_batches(plan, samples, cost, forward_only)
    llm_costs = [LLMCost.of(plan.llm, micro_batches) for micro_batches in bins]
    llm = llm_work(
        plan.llm,
        plan.stages,
        llm_costs,
        recompute=plan.options.recompute,
        forward_only=forward_only,
        lanes=plan.mesh.lanes,
    )
    training = plan.encoders_trainable and not forward_only
    woven = weave(plan, llm, bins, cost, training)
    schedule = woven.schedule if times is None else retime(plan, times, bins, woven, training)
    before = as_given(
        [plan.llm.sample_flops(sample.tokens, sample.target_tokens) for sample in given],
        [[cost.total(item) for item in sample.items] if sample.items else () for sample in given],
        plan.mesh.data,
        ranks // plan.mesh.data,
    )
    replicas = tuple(
        ReplicaPlan(
            micro_batches=micro_batches,
            members=woven.members,
            passes=woven.passes,
            parts=parts,
            encoders=tuple(meta.name for meta in plan.encoders),
            ranks=ranks,
            schedule=schedule,
            live=schedule.live,
            forward_only=forward_only,
            tied=plan.llm.tied,
            llm_trainable=plan.llm.trainable,
            encoders_trainable=plan.encoders_trainable,
            sequence=plan.mesh.sequence,
            tensor=plan.mesh.tensor,
            collective=plan.collective_forward,
            guests=woven.guests[data] if woven.guests else (),
        )
        for data, (micro_batches, parts, ranks) in enumerate(
            zip(bins, woven.parts, plan.mesh.encoder_groups(), strict=True)
        )
    )
    return StepPlan(
        mesh=plan.mesh,
        step=step,
        replicas=replicas,
        micro_batches=len(bins[0]),
        samples=len(samples),
        tokens=sum([sample.tokens for sample in samples]),
        target_tokens=sum([sample.target_tokens for sample in samples]),
        forward_only=forward_only,
        hash=_hash(step, replicas, forward_only),
        encoder_imbalance=ratio([load for loads in woven.loads for load in loads]),
        llm_imbalance=ratio([cost.total(plan.llm) for cost in llm_costs]),
        bubble_fraction=schedule.bubble_fraction,
        encoder_imbalance_given=before[0],
        llm_imbalance_given=before[1],
        long_items=long_share(samples),
        rooms=woven.rooms,
    )


def _micro_batches(
    plan: Plan, samples: Sequence[SampleMeta], cost: EncoderCost, forward_only: bool
) -> tuple[tuple[MicroBatch, ...], ...]:
    passes = 1 if forward_only else 1 + backward_factor(plan.llm, plan.options.recompute)
    return assign(
        samples,
        plan.mesh.data,
        plan.options.max_tokens_per_micro_batch,
        None if forward_only else plan.options.micro_batches,
        FILL * plan.mesh.pipe if plan.mesh.pipe > 1 else 1,
        lambda sample: passes * plan.llm.sample_flops(sample.tokens, sample.target_tokens),
        lambda sample: cost.whole(sample.items),
        balance=plan.options.balance_mode == "auto",
        groups=plan.mesh.data // plan.reorder_replicas,
    )


def _hash(step: int, replicas: Sequence[ReplicaPlan], forward_only: bool) -> int:
    """63 bits of everything that decides what ranks do: windows, messages and actions follow from it."""
    first = replicas[0]
    micro_batches = [mb.samples for replica in replicas for mb in replica.micro_batches]
    samples = list(chain.from_iterable(micro_batches))
    items = [item for sample in samples for item in sample.items]
    parts = list(chain.from_iterable([window for replica in replicas for window in replica.parts]))
    guests = list(chain.from_iterable([replica.guests for replica in replicas]))
    actions = first.schedule.stages
    # A column for each number, in the order of the plan: many appends to one array take several times longer.
    columns = (
        (step, forward_only, len(replicas), first.live, first.tied),
        list(map(len, micro_batches)),
        [sample.row for sample in samples],
        [sample.tokens for sample in samples],
        [sample.target_tokens for sample in samples],
        [len(sample.items) for sample in samples],
        [item.rows for item in items],
        [item.start for item in items],
        [item.gang for item in items],
        [item.slice for item in items],
        [len(item.spans) for item in items],
        list(chain.from_iterable(chain.from_iterable([item.spans for item in items]))),
        [len(item.shape) for item in items],
        list(chain.from_iterable([item.shape for item in items])),
        list(map(len, parts)),
        list(chain.from_iterable(parts)),
        list(map(len, guests)),
        list(chain.from_iterable(chain.from_iterable(guests))),
        list(map(len, actions)),
        [_CODE[action.kind] << 32 | action.index for action in chain.from_iterable(actions)],
    )
    digest = hashlib.blake2b(repr((first.members, first.passes)).encode(), digest_size=8)
    for column in columns:
        numbers = array("q", column)
        digest.update(len(numbers).to_bytes(8, "big"))
        digest.update(numbers.tobytes())
    return int.from_bytes(digest.digest(), "big") >> 1
