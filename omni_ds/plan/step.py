"""StepPlan: one global batch, decided from sample metadata alone.

Order of decisions: samples to micro-batches, window size (tune.py), items to ranks, schedule, transfers.
All replicas run one compute program, made from their average costs: they finish together anyway, it is
cheap, and encoder ZeRO-3 needs one order in the whole world.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from omni_ds.plan.base import LLMWork
from omni_ds.plan.batch import MicroBatch, assign
from omni_ds.plan.cost import EncoderCost, backward_factor, llm_work, mean_work
from omni_ds.plan.fill import EncoderWork, Schedule
from omni_ds.plan.plan import Plan, ReplicaPlan, StepPlan
from omni_ds.plan.reshard import PlacedItem, Window, window_transfers
from omni_ds.plan.sample import SampleMeta
from omni_ds.plan.schedule import first_stage, joint, uniform
from omni_ds.plan.shares import cut_windows, placed_items, share_first_stage, share_window
from omni_ds.plan.tune import Choice, Shape, log_step, tune

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
    choice = _choose(plan, llm, items, cost, training)
    windows = _windows(plan, choice, items, cost, training)
    encoder = _encoder_work(plan, windows, cost, training)
    schedule = _schedule(plan, llm, encoder, choice)
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


def _choose(
    plan: Plan,
    llm: LLMWork,
    items: Sequence[Sequence[Sequence[PlacedItem]]],
    cost: EncoderCost,
    training: bool,
) -> Choice:
    """Window size and the scheduler's knobs for this step's mix."""
    stages, count = llm.stages, llm.micro_batches
    if plan.options.placement == "first_stage":
        return Choice(1, 0, 0, stages)
    found = [cost.both(p.item) for replica in items for mb in replica for p in mb]
    forward, backward = sum(f for f, _ in found), sum(b for _, b in found)
    live = stages * (plan.options.live_micro_batches or stages)
    per_stage = sum(map(sum, llm.forward)) * len(items)  # over all stages and replicas
    shape = Shape(
        stages=stages,
        ranks=stages * plan.mesh.lanes,
        micro_batches=count,
        # cost of a micro-batch's items over the forward of one stage: (forward / MB) / (per_stage / (MB *
        # stages))
        encode=log_step(forward * stages, per_stage),
        encode_back=log_step(backward * stages, per_stage) if training else None,
        items=1 << max(0, (len(found) // (count * len(items))).bit_length() - 1),
        live=live,
        training=llm.backward is not None,
    )
    return tune(shape)


def _windows(
    plan: Plan,
    choice: Choice,
    items: Sequence[Sequence[Sequence[PlacedItem]]],
    cost: EncoderCost,
    training: bool,
) -> list[tuple[Window, ...]]:
    """Windows of every replica, items dealt to ranks."""
    order = plan.encoder_order
    if not plan.encoders:
        return [()] * len(items)
    members = cut_windows(len(items[0]), choice.window)
    passes = _passes(plan, members, items, training)
    result = []
    for replica, ranks in zip(items, plan.mesh.encoder_groups(), strict=True):
        windows = []
        for w, window in enumerate(members):
            mine = [placed for m in window for placed in replica[m]]
            if plan.options.placement == "first_stage":
                windows.append(share_first_stage(w, window, mine, ranks, order, passes[w]))
            else:
                windows.append(share_window(w, window, mine, ranks, cost.total, order, passes=passes[w]))
        result.append(tuple(windows))
    return result


def _passes(
    plan: Plan,
    members: Sequence[Sequence[int]],
    items: Sequence[Sequence[Sequence[PlacedItem]]],
    training: bool,
) -> list[tuple[str, ...]]:
    """Encoders that every rank has to run in a window, whatever its share (Window.passes).

    Trained encoders take part in the last window, so that every rank enters their gradient reduction. When
    passes are collectives (ZeRO-3), a window has those of all encoders with items anywhere in the world.
    """
    trained = [meta.name for meta in plan.encoders if meta.trainable] if training else []
    passes = []
    for w, window in enumerate(members):
        names = set(trained) if w == len(members) - 1 else set()
        if plan.gathers_encoders:
            names |= {placed.item.encoder for replica in items for m in window for placed in replica[m]}
        passes.append(tuple(meta.name for meta in plan.encoders if meta.name in names))
    return passes


def _encoder_work(
    plan: Plan, windows: Sequence[Sequence[Window]], cost: EncoderCost, training: bool
) -> EncoderWork:
    """Average over replicas of the dearest share of each stage, for windows in which anything has to run."""
    lanes = plan.mesh.lanes
    active = [
        w for w, same in enumerate(zip(*windows, strict=True)) if any(x.passes or not x.empty for x in same)
    ]
    forward, backward = [], []
    for w in active:
        f, b = [0] * plan.mesh.pipe, [0] * plan.mesh.pipe
        for replica in windows:
            shares = replica[w].shares
            loads = [[cost.both(p.item) for p in share.items] for share in shares]
            for stage in range(plan.mesh.pipe):
                lane = loads[stage * lanes : (stage + 1) * lanes]
                f[stage] += max(sum(x for x, _ in load) for load in lane)
                b[stage] += max(sum(x for _, x in load) for load in lane)
        forward.append(tuple(-(-x // len(windows)) for x in f))
        backward.append(tuple(-(-x // len(windows)) for x in b))
    return EncoderWork(
        tuple(windows[0][w].micro_batches for w in active),
        tuple(forward),
        tuple(backward) if training else None,
        tuple(active),
    )


def _schedule(plan: Plan, llm: LLMWork, encoder: EncoderWork, choice: Choice) -> Schedule:
    if plan.gathers_encoders:
        return uniform(llm, encoder, lead=choice.lead)
    if plan.options.placement == "first_stage":
        everywhere = encoder.numbers[-1] if encoder.backward is not None else None
        return first_stage(llm, encoder, everywhere=everywhere)
    return joint(llm, encoder, lead=choice.lead, live=choice.live, overflow=choice.overflow)


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
