"""Encoder windows, shares and schedule of a step: the search's candidates made real, the shortest taken."""

from __future__ import annotations

from collections.abc import Sequence

from omni_ds.plan.base import LLMWork, time_line
from omni_ds.plan.capacity import share_targets
from omni_ds.plan.cost import EncoderCost
from omni_ds.plan.fill import EncoderWork, Schedule
from omni_ds.plan.plan import Plan
from omni_ds.plan.reshard import PlacedItem, Window
from omni_ds.plan.schedule import first_stage, joint, uniform
from omni_ds.plan.shares import cut_windows, deal_windows, share_first_stage, share_window
from omni_ds.plan.tune import Choice, Shape, log_step, measure_items, tune, window_sizes

# Candidates tried on the real step: as many as keep planning fast, counted in stages x micro-batches x
# replicas.
TRIED_OPS, MOST_TRIES = 2048, 8
LIVE_AT_LEAST = 4  # micro-batches' worth of encoder activations a rank may always hold (PlanOptions)

Items = Sequence[Sequence[Sequence[PlacedItem]]]  # [replica][micro-batch]


def colocated(
    plan: Plan, llm: LLMWork, items: Items, cost: EncoderCost, training: bool
) -> tuple[list[tuple[Window, ...]], Schedule]:
    """Windows of every replica and the common schedule, encoders on every rank."""
    replicas, lanes, count = len(items), plan.mesh.lanes, llm.micro_batches
    both = [[[cost.both(placed.item) for placed in mb] for mb in replica] for replica in items]
    forward = [sum(f for replica in both for f, _ in replica[m]) // replicas for m in range(count)]
    backward = [sum(b for replica in both for _, b in replica[m]) // replicas for m in range(count)]
    line = time_line(llm)
    tries = max(1, min(MOST_TRIES, TRIED_OPS // (llm.stages * count * replicas)))
    best = None
    for choice in _candidates(plan, llm, both[replicas // 2], forward, backward, training)[:tries]:
        members = cut_windows(count, choice.window)
        rooms = None
        if choice.unequal:
            whole = [sum(forward[m] for m in window) // lanes for window in members]
            back = [sum(backward[m] for m in window) // lanes for window in members] if training else None
            rooms = share_targets(llm, line, members, whole, back)
        windows = _windows(plan, members, items, cost, training, rooms)
        encoder = _encoder_work(plan, windows, cost, training)
        if plan.gathers_encoders:
            schedule = uniform(llm, encoder, lead=choice.lead)
        else:
            schedule = joint(
                llm, encoder, lead=choice.lead, live=choice.live, overflow=choice.overflow, line=line
            )
        if best is None or schedule.length < best[1].length:
            best = windows, schedule
    assert best is not None
    return best


def _candidates(
    plan: Plan,
    llm: LLMWork,
    both: Sequence[Sequence[tuple[int, int]]],
    forward: Sequence[int],
    backward: Sequence[int],
    training: bool,
) -> tuple[Choice, ...]:
    """both: (forward, backward) of the items of one replica's micro-batches; forward, backward: means over
    all."""
    stages, count = llm.stages, llm.micro_batches
    if plan.gathers_encoders:
        # Nothing fills bubbles there: windows are as large as keeps encoder activations small.
        size = max(size for size in window_sizes(stages, count) if size <= stages)
        return (Choice(size, False, 0, 0, count),)
    items, spread = measure_items([[f + b for f, b in mb] for mb in both])
    one_stage = sum(map(sum, llm.forward)) // stages * plan.mesh.lanes
    return tune(
        Shape(
            stages=stages,
            micro_batches=count,
            encode=log_step(sum(forward), one_stage),
            encode_back=log_step(sum(backward), one_stage) if training else None,
            items=items,
            spread=spread,
            ranks=plan.mesh.lanes,
            live=stages * (plan.options.live_micro_batches or max(stages, LIVE_AT_LEAST)),
            training=llm.backward is not None,
        )
    )


def _windows(
    plan: Plan,
    members: Sequence[Sequence[int]],
    items: Items,
    cost: EncoderCost,
    training: bool,
    rooms: Sequence[Sequence[int]] | None,
) -> list[tuple[Window, ...]]:
    """Windows of every replica, items dealt to ranks. rooms[w]: how stages should divide window w."""
    order, lanes = plan.encoder_order, plan.mesh.lanes
    passes = _passes(plan, members, items, training)
    per_rank = rooms and [[part for part in row for _ in range(lanes)] for row in rooms]
    result = []
    for replica, ranks in zip(items, plan.mesh.encoder_groups(), strict=True):
        mine = [[placed for m in window for placed in replica[m]] for window in members]
        costs = [[cost.total(placed.item) for placed in window] for window in mine]
        dealt = deal_windows(costs, len(ranks), per_rank)
        result.append(
            tuple(
                share_window(w, window, mine[w], dealt[w], ranks, order, passes[w])
                for w, window in enumerate(members)
            )
        )
    return result


def inline(
    plan: Plan, llm: LLMWork, items: Items, cost: EncoderCost, training: bool
) -> tuple[list[tuple[Window, ...]], Schedule]:
    """placement first_stage: a window for each micro-batch, all of it on the replica's first rank."""
    members = cut_windows(llm.micro_batches, 1)
    passes = _passes(plan, members, items, training)
    windows = [
        tuple(
            share_first_stage(w, window, replica[window[0]], ranks, plan.encoder_order, passes[w])
            for w, window in enumerate(members)
        )
        for replica, ranks in zip(items, plan.mesh.encoder_groups(), strict=True)
    ]
    encoder = _encoder_work(plan, windows, cost, training)
    if plan.gathers_encoders:
        return windows, uniform(llm, encoder)
    everywhere = encoder.numbers[-1] if encoder.backward is not None else None
    return windows, first_stage(llm, encoder, everywhere=everywhere)


def _passes(
    plan: Plan,
    members: Sequence[Sequence[int]],
    items: Items,
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
