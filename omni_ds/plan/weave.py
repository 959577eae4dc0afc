"""Encoder windows, shares and schedule of a step: the search's candidates made real, the shortest taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omni_ds.plan.activations import ENOUGH
from omni_ds.plan.base import LLMWork, time_line
from omni_ds.plan.batch import MicroBatch
from omni_ds.plan.capacity import share_targets
from omni_ds.plan.cost import EncoderCost
from omni_ds.plan.fill import EncoderWork, Schedule, shorter_schedule
from omni_ds.plan.gangs import Guest, deal_with_gangs, hosted_slices
from omni_ds.plan.plan import Plan
from omni_ds.plan.schedule import first_stage, joint, uniform
from omni_ds.plan.shares import cut_windows, deal_windows
from omni_ds.plan.tune import (
    COARSE,
    Choice,
    Shape,
    log_step,
    measure_items,
    round_step,
    tune,
    window_sizes,
)

# Candidates tried on the real step: as many as keep planning fast, counted in stages x micro-batches x
# replicas.
TRIED_OPS, MOST_TRIES = 4096, 8
# Items x ranks of an encoder group up to which items are dealt by differencing.
EXACT_DEAL = 1 << 14
MEASURED = 8  # replicas
# Steps count as equally long within one part in NEAR; then larger windows are taken: fewer messages and
# encoder passes, and media dealt more evenly.
NEAR = 80
LIVE_AT_LEAST = 4  # micro-batches' worth of encoder activations a rank may always hold (PlanOptions)

# Sizes of the integers that items are dealt by: a replica's step, a window's rooms. Python calculates faster
# with integers of one digit (30 bits), and for every window of every replica.
DEAL_BITS, ROOM_BITS = 28, 12

Table = list[list[list[int]]]
Parts = tuple[tuple[tuple[int, ...], ...], ...]  # [window][rank]: indices of the window's items


@dataclass(frozen=True)
class Woven:
    """parts[replica]: who encodes what; guests[replica]: slices on ranks of others. loads[replica][rank]:
    encoder FLOPs of the step. work: of the windows in which anything runs. rooms[window][position]: how the
    ranks of a replica should divide a window, in any unit; None: evenly."""

    members: tuple[tuple[int, ...], ...]
    passes: tuple[tuple[str, ...], ...]
    parts: tuple[Parts, ...]
    guests: tuple[tuple[tuple[Guest, ...], ...], ...]
    loads: tuple[tuple[int, ...], ...]
    work: EncoderWork
    schedule: Schedule
    rooms: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True)
class Costs:
    """forward, backward [replica][micro-batch][item]: FLOPs; both: their sum, coarser, for dealing; gangs:
    Item.gang, None when nothing is sliced."""

    forward: Table
    backward: Table
    both: Table
    replicas: Sequence[Sequence[MicroBatch]]
    gangs: Table | None

    @classmethod
    def of(cls, replicas: Sequence[Sequence[MicroBatch]], cost: EncoderCost) -> Costs:
        forward, backward = [], []
        for micro_batches in replicas:
            pairs = [
                [cost.both(item) for sample in mb.samples for item in sample.items] for mb in micro_batches
            ]
            forward.append([[f for f, _ in mb] for mb in pairs])
            backward.append([[b for _, b in mb] for mb in pairs])
        total = sum([sum(map(sum, table)) for table in (*forward, *backward)])
        shift = max(0, (total // len(replicas)).bit_length() - DEAL_BITS)
        both = [
            [[1 + (x + y >> shift) for x, y in zip(*mb, strict=True)] for mb in zip(*replica, strict=True)]
            for replica in zip(forward, backward, strict=True)
        ]
        gangs = [
            [[item.gang for sample in mb.samples for item in sample.items] for mb in micro_batches]
            for micro_batches in replicas
        ]
        sliced = any(gang > 1 for replica in gangs for mb in replica for gang in mb)
        return cls(forward, backward, both, replicas, gangs if sliced else None)

    def windows(self, table: Table, members: Sequence[Sequence[int]]) -> Table:
        """One of the tables as [replica][window][item]."""
        if all(len(window) == 1 for window in members):
            return table
        return [[[x for m in window for x in replica[m]] for window in members] for replica in table]

    def names(self, window: Sequence[int]) -> set[str]:
        """Encoders that a window of any replica needs."""
        samples = (s for replica in self.replicas for m in window for s in replica[m].samples)
        return {item.encoder for sample in samples for item in sample.items}

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
        return Woven((), (), nothing, nothing, nothing, work, joint(llm, work))
    if plan.options.placement == "first_stage":
        return _first_stage(plan, llm, costs, training)
    return _colocated(plan, llm, costs, training)


def _colocated(plan: Plan, llm: LLMWork, costs: Costs, training: bool) -> Woven:
    replicas, lanes, count = len(costs.forward), plan.mesh.lanes, llm.micro_batches
    forward, backward = costs.mean(costs.forward), costs.mean(costs.backward)
    exact = llm.stages * lanes * sum(len(mb) for replica in costs.forward for mb in replica) <= EXACT_DEAL
    line = time_line(llm)
    tries = max(1, min(MOST_TRIES, TRIED_OPS // (llm.stages * count * replicas)))
    found: list[Woven] = []
    limit = 1 << 200
    for choice in _candidates(plan, llm, costs, forward, backward, training)[:tries]:
        members = cut_windows(count, choice.window)
        rooms = None
        if choice.unequal:
            whole = [sum(forward[m] for m in window) // lanes for window in members]
            back = [sum(backward[m] for m in window) // lanes for window in members] if training else None
            rooms = share_targets(llm, line, members, whole, back)
            rooms = [
                [(part << ROOM_BITS) // max(1, sum(row)) for part in row for _ in range(lanes)]
                for row in rooms
            ]
        windows, guests = costs.windows(costs.both, members), ()
        if costs.gangs is None:
            parts = [tuple(deal_windows(both, llm.stages * lanes, rooms, exact=exact)) for both in windows]
        else:
            gangs = costs.windows(costs.gangs, members)
            deal = deal_with_gangs(plan.mesh, plan.reorder_replicas, windows, gangs, rooms, exact=exact)
            parts, guests = deal.parts, tuple(deal.guests)
        passes = _passes(plan, members, costs, training)
        encoder, loads = _encoder_work(plan, members, passes, parts, costs, training, guests)
        if plan.inserts_uniformly:
            schedule = uniform(llm, encoder, lead=choice.lead)
            return Woven(members, passes, tuple(parts), guests, loads, encoder, schedule)
        for overflow in choice.overflows()[: 1 + (tries > 1)]:
            schedule = shorter_schedule(
                llm,
                encoder,
                line,
                lead=choice.lead,
                live=choice.live,
                overflow=overflow,
                limit=limit,
            )
            if schedule is not None:
                found.append(Woven(members, passes, tuple(parts), guests, loads, encoder, schedule, rooms))
                limit = min(limit, schedule.length + schedule.length // NEAR)
    shortest = min(woven.schedule.length for woven in found)
    near = [woven for woven in found if woven.schedule.length <= shortest + shortest // NEAR]
    return min(near, key=lambda woven: (len(woven.members), woven.schedule.length))


def _candidates(
    plan: Plan, llm: LLMWork, costs: Costs, forward: Sequence[int], backward: Sequence[int], training: bool
) -> tuple[Choice, ...]:
    """forward, backward: mean encoder cost of each micro-batch."""
    stages, count = llm.stages, llm.micro_batches
    if plan.inserts_uniformly:
        # Nothing fills bubbles there: windows are as large as keeps encoder activations small.
        size = max(size for size in window_sizes(stages, count) if size <= stages)
        return (Choice(size, False, 0, 0, count),)
    if stages == 1:
        # There is no bubble to fill, so nothing is gained by encoding early: one window is alive at a time.
        tokens = sum(sum(i.segments) for mb in costs.replicas[0] for s in mb.samples for i in s.items)
        enough = [n for n in window_sizes(1, count) if tokens * n >= ENOUGH * plan.mesh.lanes * count]
        return (Choice(min(enough, default=count), False, 0, 0, 1),)
    # How unequal items are: of a single replica it differs from step to step, and so would the kind.
    items, spread = measure_items([mb for replica in costs.both[:MEASURED] for mb in replica])
    one_stage = sum(map(sum, llm.forward)) // stages * plan.mesh.lanes
    encode = log_step(sum(forward), one_stage) // COARSE * COARSE
    return tune(
        Shape(
            stages=stages,
            micro_batches=count,
            encode=encode,
            # By its ratio to the forward, which hardly differs between steps: fewer kinds than by itself.
            encode_back=encode + round_step(log_step(sum(backward), sum(forward))) if training else None,
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
    return Woven(members, passes, tuple(parts), (), loads, encoder, schedule)


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
            names |= costs.names(window)
        passes.append(tuple(meta.name for meta in plan.encoders if meta.name in names))
    return tuple(passes)


def _encoder_work(
    plan: Plan,
    members: Sequence[tuple[int, ...]],
    passes: Sequence[tuple[str, ...]],
    parts: Sequence[Parts],
    costs: Costs,
    training: bool,
    guests: Sequence[Sequence[Sequence[Guest]]] = (),
) -> tuple[EncoderWork, tuple[tuple[int, ...], ...]]:
    """Average over replicas of the dearest share of each stage, for windows in which anything has to run;
    and the load of every rank over the step."""
    lanes, stages, count = plan.mesh.lanes, plan.mesh.pipe, len(parts)
    loads = [[0] * (stages * lanes) for _ in parts]
    f_cost, b_cost = costs.windows(costs.forward, members), costs.windows(costs.backward, members)
    active, forward, backward = [], [], []
    for w in range(len(members)):
        f_sum, b_sum, used = [0] * stages, [0] * stages, bool(passes[w])
        for d, (mine, dealt, f_window, b_window) in enumerate(zip(loads, parts, f_cost, b_cost, strict=True)):
            f, b, hosted = f_window[w], b_window[w], hosted_slices(plan.mesh, guests, w, d)
            if not f and not hosted:
                continue
            used = True
            # The dearest rank of each stage; with one rank a stage that is the rank itself.
            f_rank, b_rank = (f_sum, b_sum) if lanes == 1 else ([0] * stages, [0] * stages)
            for r, part in enumerate(dealt[w]):
                if part or r in hosted:
                    x = y = 0
                    for i in part:
                        x += f[i]
                        y += b[i]
                    for other, i in hosted.get(r, ()):
                        x += f_cost[other][w][i]
                        y += b_cost[other][w][i]
                    mine[r] += x + y
                    if lanes == 1:
                        f_rank[r] += x
                        b_rank[r] += y
                    else:
                        stage = r // lanes
                        f_rank[stage], b_rank[stage] = max(f_rank[stage], x), max(b_rank[stage], y)
            if lanes > 1:
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
