"""StepPlan: one global batch, decided from sample metadata alone.

Order of decisions: samples to micro-batches, window size (tune.py), items to ranks, schedule, transfers.
All replicas run one compute program, made from their average costs: they finish together anyway, it is
cheap, and encoder ZeRO-3 needs one order in the whole world.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from omni_ds.plan.batch import MicroBatch, assign
from omni_ds.plan.cost import EncoderCost, backward_factor, llm_work, mean_work
from omni_ds.plan.fill import EncoderWork
from omni_ds.plan.plan import Plan, ReplicaPlan, StepPlan
from omni_ds.plan.reshard import Window, window_transfers
from omni_ds.plan.sample import SampleMeta
from omni_ds.plan.schedule import joint
from omni_ds.plan.shares import placed_items
from omni_ds.plan.weave import colocated, inline

FILL = 4  # micro-batches per stage where samples allow: the pipeline idles (P - 1) / (M + P - 1) of the time


def build_step(
    plan: Plan, step: int, samples: Sequence[SampleMeta], *, forward_only: bool = False
) -> StepPlan:
    """Plan one global batch. Deterministic: a function of its arguments alone, in integers.

    samples: of the whole global batch, in sampler order, each within the token budget. forward_only:
    evaluation. UserError when a fixed number of micro-batches cannot hold the batch.
    """
    cost = EncoderCost(plan.encoders, plan.options.encoder_recompute)
    bins = _micro_batches(plan, samples, cost, forward_only)
    works = [
        llm_work(plan.llm, plan.stages, mbs, recompute=plan.options.recompute, forward_only=forward_only)
        for mbs in bins
    ]
    llm = mean_work(works)
    items = [[placed_items(mb) for mb in mbs] for mbs in bins]
    training = plan.encoders_trainable and not forward_only
    if not plan.encoders:
        windows, schedule = [()] * len(items), joint(llm, EncoderWork((), ()))
    else:
        place = inline if plan.options.placement == "first_stage" else colocated
        windows, schedule = place(plan, llm, items, cost, training)
    replicas = []
    for mbs, mine, ranks in zip(bins, windows, plan.mesh.encoder_groups(), strict=True):
        transfers = tuple(t for window in mine for t in window_transfers(window, ranks[0]))
        replicas.append(
            ReplicaPlan(
                micro_batches=mbs,
                windows=mine,
                transfers=transfers,
                ranks=ranks,
                schedule=schedule,
                live=schedule.live,
                forward_only=forward_only,
                tied=plan.llm.tied,
                llm_trainable=plan.llm.trainable,
                encoders_trainable=plan.encoders_trainable,
            )
        )
    return StepPlan(
        mesh=plan.mesh,
        step=step,
        replicas=tuple(replicas),
        micro_batches=len(bins[0]),
        samples=len(samples),
        tokens=sum(sample.tokens for sample in samples),
        target_tokens=sum(sample.target_tokens for sample in samples),
        forward_only=forward_only,
        hash=_hash(step, replicas, forward_only),
        encoder_imbalance=_encoder_imbalance(plan, windows, cost),
        llm_imbalance=_ratio([work.total for work in works]),
        bubble_fraction=schedule.bubble_fraction,
    )


def _micro_batches(
    plan: Plan, samples: Sequence[SampleMeta], cost: EncoderCost, forward_only: bool
) -> tuple[tuple[MicroBatch, ...], ...]:
    passes = 1 if forward_only else 1 + backward_factor(plan.llm, plan.options.recompute)
    return assign(
        samples,
        plan.mesh.data_degree,
        plan.options.max_tokens_per_micro_batch,
        None if forward_only else plan.options.micro_batches,
        FILL * plan.mesh.pipe if plan.mesh.pipe > 1 else 1,
        lambda sample: passes * plan.llm.sample_flops(sample.tokens, sample.target_tokens),
        lambda sample: sum(cost.total(item) for item in sample.items),
        balance=plan.options.balance_mode == "auto",
    )


def _encoder_imbalance(plan: Plan, windows: Sequence[Sequence[Window]], cost: EncoderCost) -> float:
    loads = {rank: 0 for rank in range(plan.mesh.world_size)}
    for replica in windows:
        for window in replica:
            for share in window.shares:
                loads[share.rank] += sum(cost.total(placed.item) for placed in share.items)
    return _ratio(list(loads.values()))


def _ratio(loads: Sequence[int]) -> float:
    """Largest over mean; 1 when there is nothing."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def _hash(step: int, replicas: Sequence[ReplicaPlan], forward_only: bool) -> int:
    """63 bits of everything that decides what ranks do: messages and actions follow from it."""
    text = [f"{step} {forward_only}"]
    for replica in replicas:
        text += [
            f"m {[(s.row, s.tokens, s.target_tokens) for s in mb.samples]}" for mb in replica.micro_batches
        ]
        for window in replica.windows:
            text.append(f"w {window.micro_batches} {window.passes}")
            for share in window.shares:
                text.append(
                    f"s {[(p.micro_batch, p.position, p.item.ordinal, p.item.rows) for p in share.items]}"
                )
    for stage in replicas[0].schedule.stages:
        text.append(" ".join(map(str, stage)))
    digest = hashlib.blake2b("\n".join(text).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
