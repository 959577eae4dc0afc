"""The schedule of a step made again with measured times: actions move, everything else stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omni_ds.plan.base import LLMWork, time_line
from omni_ds.plan.batch import MicroBatch
from omni_ds.plan.fill import EncoderWork, Schedule
from omni_ds.plan.gangs import hosted_slices
from omni_ds.plan.plan import Plan
from omni_ds.plan.sample import Item
from omni_ds.plan.schedule import first_stage, joint, uniform
from omni_ds.plan.times import TimeModel, llm_key
from omni_ds.plan.weave import Woven

OVERFLOWS = (0, 125, 500)  # per mille of a pause that encoder work may add to a bubble, as in list_schedule


def retime(
    plan: Plan, times: TimeModel, replicas: Sequence[Sequence[MicroBatch]], woven: Woven, training: bool
) -> Schedule:
    """Schedule ``woven``'s windows and shares by predicted nanoseconds instead of FLOPs.

    training: encoder gradients are wanted. Whatever order comes out, gradients accumulate in window order, so
    the result of the step is the same bit for bit.
    """
    llm = _llm_work(plan, times, replicas, woven)
    encoder = _encoder_work(plan, times, replicas, woven, training)
    if not encoder.windows:
        return joint(llm, encoder)
    leads = sorted({0, 1, 2, llm.stages // 2, llm.stages, 2 * llm.stages})
    if plan.options.placement == "first_stage" and not plan.gathers_encoders:
        everywhere = encoder.numbers[-1] if encoder.backward is not None else None
        return first_stage(llm, encoder, everywhere=everywhere)
    if plan.inserts_uniformly:
        found = [uniform(llm, encoder, lead=lead) for lead in leads]
    else:
        line, live = time_line(llm), woven.schedule.live
        found = [
            joint(llm, encoder, lead=lead, live=live, overflow=overflow, line=line)
            for lead in leads
            for overflow in OVERFLOWS
        ]
    return min(found, key=lambda schedule: schedule.length)


def _llm_work(
    plan: Plan, times: TimeModel, replicas: Sequence[Sequence[MicroBatch]], woven: Woven
) -> LLMWork:
    count, stages = len(replicas), range(plan.mesh.pipe)
    sizes = [[_llm_sizes(mb) for mb in micro_batches] for micro_batches in replicas]
    trains = any(action.kind.value == "B" for actions in woven.schedule.stages for action in actions)

    def mean(kind: str, stage: int) -> tuple[int, ...]:
        key = llm_key(kind, stage)
        columns = zip(*sizes, strict=True)
        return tuple(sum(times.predict(key, size) for size in column) // count for column in columns)

    return LLMWork(
        tuple(mean("F", stage) for stage in stages),
        tuple(mean("B", stage) for stage in stages) if trains else None,
    )


def _llm_sizes(micro_batch: MicroBatch) -> tuple[int, int]:
    return micro_batch.tokens, sum(n * n for n in micro_batch.lengths)


def _encoder_work(
    plan: Plan, times: TimeModel, replicas: Sequence[Sequence[MicroBatch]], woven: Woven, training: bool
) -> EncoderWork:
    """Average over replicas of the slowest share of each stage, slices that it hosts for others included."""
    active = woven.work
    forward, backward = [], []
    for position, window in enumerate(active.windows):
        number = active.number(position)
        items = [_items(micro_batches, window) for micro_batches in replicas]
        shares = []
        for data, parts in enumerate(woven.parts):
            hosted = hosted_slices(plan.mesh, woven.guests, number, data)
            shares.append(
                [
                    _share_sizes(
                        plan,
                        [items[data][i] for i in part] + [items[other][i] for other, i in hosted.get(r, ())],
                    )
                    for r, part in enumerate(parts[number])
                ]
            )
        forward.append(_by_stage(plan, shares, lambda sizes: times.predict("EF", sizes)))
        backward.append(_by_stage(plan, shares, lambda sizes: times.predict("EB", sizes)))
    return EncoderWork(active.windows, tuple(forward), tuple(backward) if training else None, active.numbers)


def _by_stage(
    plan: Plan, shares: Sequence[Sequence[tuple[int, ...]]], predict: Callable[[tuple[int, ...]], int]
) -> tuple[int, ...]:
    lanes, count = plan.mesh.lanes, len(shares)
    costs = [[predict(sizes) if any(sizes) else 0 for sizes in replica] for replica in shares]
    return tuple(
        sum(max(replica[stage * lanes : (stage + 1) * lanes]) for replica in costs) // count
        for stage in range(plan.mesh.pipe)
    )


def _items(micro_batches: Sequence[MicroBatch], window: Sequence[int]) -> list[Item]:
    return [item for m in window for sample in micro_batches[m].samples for item in sample.items]


def _share_sizes(plan: Plan, items: Sequence[Item]) -> tuple[int, ...]:
    """tokens, tokens^2 of each encoder."""
    found = {meta.name: [0, 0] for meta in plan.encoders}
    for item in items:
        entry = found[item.encoder]
        tokens, squares = item.sizes
        entry[0] += tokens
        entry[1] += squares
    return tuple(size for entry in found.values() for size in entry)
