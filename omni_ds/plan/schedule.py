"""Compute schedules of a step: the joint one, and the two plainer ones it is measured against.

- `joint`: list scheduling in bubbles first, then uniform (fill.py). For encoders whose passes are free of
  world
  collectives (ZeRO 1-2, or nothing to train).
- `uniform`: every pass at the same point of the schedule on every rank of the world, in one order (ZeRO-3).
- `first_stage`: encoders inline on stage 0 (a baseline).
"""

from __future__ import annotations

from bisect import bisect_left

from omni_ds.plan.actions import Action, Kind
from omni_ds.plan.base import LLMWork, TimeLine, time_line
from omni_ds.plan.fill import EncoderWork, Schedule, list_schedule
from omni_ds.plan.replay import replay


def joint(
    llm: LLMWork,
    encoder: EncoderWork,
    *,
    lead: int = 0,
    live: int = 2,
    overflow: int = 500,
    line: TimeLine | None = None,
) -> Schedule:
    """Bubbles first, then uniform on demand."""
    return list_schedule(llm, encoder, line or time_line(llm), lead=lead, live=live, overflow=overflow)


def uniform(llm: LLMWork, encoder: EncoderWork, *, lead: int = 0) -> Schedule:
    """Every stage pauses for EF and EB at one cut through the LLM's schedule.

    The cut before moment t of the LLM-only time line (all forwards cost 1, backwards 2) has on every stage
    the ops that start earlier in front of it. An op starts after what it needs, so no op in front of a cut
    needs one behind it: passes that all ranks enter together cannot deadlock with the pipeline's messages.
    The order depends on the shape (stages, micro-batches, windows) alone, hence is one for all replicas.
    """
    stages, count = llm.stages, llm.micro_batches
    unit = LLMWork(((1,) * count,) * stages, None if llm.backward is None else ((2,) * count,) * stages)
    line, programs = time_line(unit), llm.programs
    starts = {op: line.start[0][i] for i, op in enumerate(programs[0])}
    cuts = []
    for w, members in enumerate(encoder.windows):
        cuts.append((starts[False, max(0, members[0] - lead)], 1, w, Kind.EF))
        if encoder.backward is not None:
            cuts.append((starts[True, members[-1]] + 1, 0, w, Kind.EB))
    cuts.sort(key=lambda cut: cut[:3])
    out = []
    for s in range(stages):
        actions, done = [], 0
        for moment, _, w, kind in cuts:
            position = max(done, bisect_left(line.start[s], moment))
            actions += [_llm_action(op) for op in programs[s][done:position]]
            actions.append(Action(kind, encoder.number(w)))
            done = position
        out.append(tuple(actions) + tuple(_llm_action(op) for op in programs[s][done:]))
    return replay(llm, encoder, out, together=True)


def first_stage(llm: LLMWork, encoder: EncoderWork, *, everywhere: int | None = None) -> Schedule:
    """Stage 0 encodes each window right before its first forward and goes back right after its last backward.

    everywhere: a window in which the other stages take part too, with an empty share, at the end of their
    programs.
    """
    before = {members[0]: w for w, members in enumerate(encoder.windows)}
    after = {members[-1]: w for w, members in enumerate(encoder.windows)}
    out = []
    for s, program in enumerate(llm.programs):
        actions: list[Action] = []
        for is_backward, m in program:
            if s == 0 and not is_backward and m in before:
                actions.append(Action(Kind.EF, encoder.number(before[m])))
            actions.append(_llm_action((is_backward, m)))
            if s == 0 and is_backward and m in after and encoder.backward is not None:
                actions.append(Action(Kind.EB, encoder.number(after[m])))
        if s and everywhere is not None:
            actions.append(Action(Kind.EF, everywhere))
            if encoder.backward is not None:
                actions.append(Action(Kind.EB, everywhere))
        out.append(tuple(actions))
    return replay(llm, encoder, out, sources=(0,))


def _llm_action(op: tuple[bool, int]) -> Action:
    return Action(Kind.B if op[0] else Kind.F, op[1])
