"""Encoder windows, shares and schedule of a step: the search's candidates made real, the shortest taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omni_ds.plan.base import LLMWork, time_line
from omni_ds.plan.batch import MicroBatch
from omni_ds.plan.capacity import share_targets
from omni_ds.plan.cost import EncoderCost
from omni_ds.plan.fill import EncoderWork, Schedule
from omni_ds.plan.plan import Plan
from omni_ds.plan.schedule import first_stage, joint, uniform
from omni_ds.plan.shares import cut_windows, deal_windows
from omni_ds.plan.tune import COARSE, Choice, Shape, log_step, measure_items, tune, window_sizes

# Candidates tried on the real step: as many as keep planning fast, counted in stages x micro-batches x
# replicas.
TRIED_OPS, MOST_TRIES = 4096, 8
# Items x ranks of an encoder group up to which items are dealt by differencing.
EXACT_DEAL = 1 << 14
LIVE_AT_LEAST = 4  # micro-batches' worth of encoder activations a rank may always hold (PlanOptions)

Parts = tuple[tuple[tuple[int, ...], ...], ...]  # [window][rank]: indices of the window's items


@dataclass(frozen=True)
class Woven:
    """parts[replica]: who encodes what. loads[replica][rank]: encoder FLOPs of the step. work: of the windows
    in which anything runs."""

    members: tuple[tuple[int, ...], ...]
    passes: tuple[tuple[str, ...], ...]
    parts: tuple[Parts, ...]
    loads: tuple[tuple[int, ...], ...]
    work: EncoderWork
    schedule: Schedule


@dataclass(frozen=True)
class Costs:
    """forward, backward [replica][micro-batch][item]: FLOPs; names [replica][micro-batch]: encoders in
    use."""

    forward: list[list[list[int]]]
    backward: list[list[list[int]]]
    names: list[list[set[str]]]

    @classmethod
    def of(cls, replicas: Sequence[Sequence[MicroBatch]], cost: EncoderCost) -> Costs:
        forward, backward, names = [], [], []
        for micro_batches in replicas:
            items = [[item for sample in mb.samples for item in sample.items] for mb in micro_batches]
            both = [[cost.both(item) for item in mb] for mb in items]
            forward.append([[f for f, _ in mb] for mb in both])
            backward.append([[b for _, b in mb] for mb in both])
            names.append([{item.encoder for item in mb} for mb in items])
        return cls(forward, backward, names)

    def mean(self, table: list[list[list[int]]]) -> list[int]:
        """Cost of each micro-batch, averaged over replicas."""
        return [sum(map(sum, column)) // len(table) for column in zip(*table, strict=True)]


def weave(
    plan: Plan, llm: LLMWork, replicas: Sequence[Sequence[MicroBatch]], cost: EncoderCost, training: bool
) -> Woven:
    """Decide windows, shares and the common schedule. training: encoder gradients are wanted."""
    costs = Costs.of(replicas, cost)
    if not plan.encoders:
        nothing = ((),) * len(replicas)
        work = EncoderWork((), ())
        return Woven((), (), nothing, nothing, work, joint(llm, work))
    if plan.options.placement == "first_stage":
        return _first_stage(plan, llm, costs, training)
    return _colocated(plan, llm, costs, training)


def _colocated(plan: Plan, llm: LLMWork, costs: Costs, training: bool) -> Woven:
    replicas, lanes, count = len(costs.forward), plan.mesh.lanes, llm.micro_batches
    forward, backward = costs.mean(costs.forward), costs.mean(costs.backward)
    exact = llm.stages * lanes * sum(len(mb) for replica in costs.forward for mb in replica) <= EXACT_DEAL
    line = time_line(llm)
    tries = max(1, min(MOST_TRIES, TRIED_OPS // (llm.stages * count * replicas)))
    best = None
    for choice in _candidates(plan, llm, costs, forward, backward, training)[:tries]:
        members = cut_windows(count, choice.window)
        rooms = None
        if choice.unequal:
            whole = [sum(forward[m] for m in window) // lanes for window in members]
            back = [sum(backward[m] for m in window) // lanes for window in members] if training else None
            rooms = share_targets(llm, line, members, whole, back)
            rooms = [[part for part in row for _ in range(lanes)] for row in rooms]
        parts = []
        for f, b in zip(costs.forward, costs.backward, strict=True):
            both = [[x + y for m in window for x, y in zip(f[m], b[m], strict=True)] for window in members]
            parts.append(tuple(deal_windows(both, llm.stages * lanes, rooms, exact=exact)))
        passes = _passes(plan, members, costs, training)
        encoder, loads = _encoder_work(plan, members, passes, parts, costs, training)
        if plan.gathers_encoders:
            tried = [uniform(llm, encoder, lead=choice.lead)]
        else:
            tried = [
                joint(llm, encoder, lead=choice.lead, live=choice.live, overflow=overflow, line=line)
                for overflow in choice.overflows()[: 1 + (tries > 1)]
            ]
        schedule = min(tried, key=lambda found: found.length)
        if best is None or schedule.length < best.schedule.length:
            best = Woven(members, passes, tuple(parts), loads, encoder, schedule)
    assert best is not None
    return best


def _candidates(
    plan: Plan, llm: LLMWork, costs: Costs, forward: Sequence[int], backward: Sequence[int], training: bool
) -> tuple[Choice, ...]:
    """forward, backward: mean encoder cost of each micro-batch."""
    stages, count = llm.stages, llm.micro_batches
    if plan.gathers_encoders:
        # Nothing fills bubbles there: windows are as large as keeps encoder activations small.
        size = max(size for size in window_sizes(stages, count) if size <= stages)
        return (Choice(size, False, 0, 0, count),)
    middle = len(costs.forward) // 2
    items, spread = measure_items(costs.forward[middle])
    one_stage = sum(map(sum, llm.forward)) // stages * plan.mesh.lanes
    return tune(
        Shape(
            stages=stages,
            micro_batches=count,
            encode=log_step(sum(forward), one_stage) // COARSE * COARSE,
            encode_back=log_step(sum(backward), one_stage) // COARSE * COARSE if training else None,
            items=items,
            spread=spread,
            ranks=plan.mesh.lanes,
            live=stages * (plan.options.live_micro_batches or max(stages, LIVE_AT_LEAST)),
            training=llm.backward is not None,
        )
    )


def _first_stage(plan: Plan, llm: LLMWork, costs: Costs, training: bool) -> Woven:
    """A window for each micro-batch, dealt to the ranks of the replica's first stage."""
    members = cut_windows(llm.micro_batches, 1)
    passes = _passes(plan, members, costs, training)
    others = ((),) * ((llm.stages - 1) * plan.mesh.lanes)
    parts = [
        tuple((*dealt, *others) for dealt in deal_windows(replica, plan.mesh.lanes))
        for replica in costs.forward
    ]
    encoder, loads = _encoder_work(plan, members, passes, parts, costs, training)
    if plan.gathers_encoders:
        schedule = uniform(llm, encoder)
    else:
        everywhere = encoder.numbers[-1] if encoder.backward is not None else None
        schedule = first_stage(llm, encoder, everywhere=everywhere)
    return Woven(members, passes, tuple(parts), loads, encoder, schedule)


def _passes(
    plan: Plan, members: Sequence[Sequence[int]], costs: Costs, training: bool
) -> tuple[tuple[str, ...], ...]:
    """Encoders that every rank has to run in a window, whatever its share (Window.passes).

    Trained encoders take part in the last window, so that every rank enters their gradient reduction. When
    passes are collectives (ZeRO-3), a window has those of all encoders with items anywhere in the world.
    """
    trained = [meta.name for meta in plan.encoders if meta.trainable] if training else []
    passes = []
    for w, window in enumerate(members):
        names = set(trained) if w == len(members) - 1 else set()
        if plan.gathers_encoders:
            names = names.union(*(replica[m] for replica in costs.names for m in window))
        passes.append(tuple(meta.name for meta in plan.encoders if meta.name in names))
    return tuple(passes)


def _encoder_work(
    plan: Plan,
    members: Sequence[tuple[int, ...]],
    passes: Sequence[tuple[str, ...]],
    parts: Sequence[Parts],
    costs: Costs,
    training: bool,
) -> tuple[EncoderWork, tuple[tuple[int, ...], ...]]:
    """Average over replicas of the dearest share of each stage, for windows in which anything has to run;
    and the load of every rank over the step."""
    lanes, stages, count = plan.mesh.lanes, plan.mesh.pipe, len(parts)
    loads = [[0] * (stages * lanes) for _ in parts]
    active, forward, backward = [], [], []
    for w, window in enumerate(members):
        f_sum, b_sum, used = [0] * stages, [0] * stages, bool(passes[w])
        for replica, dealt in enumerate(parts):
            f = [x for m in window for x in costs.forward[replica][m]]
            if not f:
                continue
            used = True
            b = [x for m in window for x in costs.backward[replica][m]]
            mine, f_rank, b_rank = loads[replica], [0] * stages, [0] * stages
            for r, part in enumerate(dealt[w]):
                if part:
                    x, y = sum([f[i] for i in part]), sum([b[i] for i in part])
                    mine[r] += x + y
                    stage = r // lanes
                    f_rank[stage], b_rank[stage] = max(f_rank[stage], x), max(b_rank[stage], y)
            for stage in range(stages):
                f_sum[stage] += f_rank[stage]
                b_sum[stage] += b_rank[stage]
        if used:
            active.append(w)
            forward.append(tuple(-(-x // count) for x in f_sum))
            backward.append(tuple(-(-x // count) for x in b_sum))
    work = EncoderWork(
        tuple(members[w] for w in active),
        tuple(forward),
        tuple(backward) if training else None,
        tuple(active),
    )
    return work, tuple(map(tuple, loads))
