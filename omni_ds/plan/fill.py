"""List scheduling of encoder windows into the LLM's pipeline, by event simulation.

Every stage runs its LLM program in order and, in window order, the forwards and backwards of its shares.
When a stage is free:
1. an encoder forward that is *due* runs (uniform on demand): all stages reach its due point at the same
  time of the
   LLM-only time line, so that they pause together and the 1F1B chain only shifts;
2. otherwise the next LLM op runs if it is ready;
3. otherwise (a bubble) the next encoder forward runs, or the next backward whose gradients are there, if it
  fits:
   it may reach past the earliest time the LLM op can be ready by no more than `overflow`.
A window may only be encoded while fewer than `live` windows of the stage wait for their backward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heappushpop

from omni_ds.plan.actions import Action, Kind
from omni_ds.plan.base import LLMWork, TimeLine
from omni_ds.plan.layout import layout_of


@dataclass(frozen=True)
class EncoderWork:
    """Encoder costs of one replica. windows[w]: its micro-batches, consecutive; forward[w][stage]: cost of
    the share of a rank of that stage (of the dearest one when a stage has several); backward likewise, None
    when no encoder is trained. numbers: index of each window in the step plan (windows without media may be
    left out)."""

    windows: tuple[tuple[int, ...], ...]
    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...] | None = None
    numbers: tuple[int, ...] | None = None

    def number(self, w: int) -> int:
        return w if self.numbers is None else self.numbers[w]


@dataclass(frozen=True)
class Schedule:
    """Compute actions of each stage in order, and when the simulation ran them.

    times[stage][i]: (start, end) of stages[stage][i]; live: bound on live windows of a stage.
    """

    stages: tuple[tuple[Action, ...], ...]
    times: tuple[tuple[tuple[int, int], ...], ...]
    live: int

    @property
    def length(self) -> int:
        return max((times[-1][1] for times in self.times if times), default=0)

    @property
    def busy(self) -> tuple[int, ...]:
        return tuple(sum(end - start for start, end in times) for times in self.times)

    @property
    def bubble_fraction(self) -> float:
        """Share of the stages' time in which nothing runs."""
        total = self.length * len(self.stages)
        return 1 - sum(self.busy) / total if total else 0.0


def live_peak(stages: Sequence[Sequence[Action]]) -> int:
    """Most windows any stage has encoded and not yet gone back through."""
    peak = 0
    for actions in stages:
        live = 0
        for action in actions:
            live += (action.kind is Kind.EF) - (action.kind is Kind.EB)
            peak = max(peak, live)
    return peak


def smallest_live(windows: tuple[tuple[int, ...], ...], stages: int) -> int:
    """Fewest live windows that cannot deadlock: 1F1B starts `stages` micro-batches before the first backward.

    Window w may wait for the backward of window w - live, hence for stage 0's backward of that window's last
    micro-batch, before which stage 0 has to start the forwards of the next stages - 1 micro-batches.
    """
    live = 1
    for w, members in enumerate(windows):
        while w - live >= 0 and windows[w - live][-1] + stages > members[0]:
            live += 1
    return live


def list_schedule(
    llm: LLMWork, encoder: EncoderWork, line: TimeLine, *, lead: int = 0, live: int = 2, overflow: int = 0
) -> Schedule:
    """Weave the encoder windows into the LLM's programs.

    lead: how many micro-batches before its first consumer a window is due. live: bound on live windows;
    raised to `smallest_live`. overflow: how far an action in a bubble may reach past it, in thousandths of
    its own length.
    """
    found = shorter_schedule(llm, encoder, line, lead=lead, live=live, overflow=overflow, limit=1 << 200)
    assert found is not None
    return found


def shorter_schedule(
    llm: LLMWork, encoder: EncoderWork, line: TimeLine, *, lead: int, live: int, overflow: int, limit: int
) -> Schedule | None:
    """`list_schedule`, or None when it is not shorter than `limit`: given up as soon as that is certain."""
    windows, training = encoder.windows, encoder.backward is not None
    live = max(live, smallest_live(windows, llm.stages)) if training else len(windows)
    found = _simulate(llm, encoder, _due_points(llm, windows, line, lead), live, overflow, limit)
    schedule = None if found is None else Schedule(*found, live)
    return schedule if schedule is not None and schedule.length < limit else None


def _due_points(llm: LLMWork, windows: Sequence[Sequence[int]], line: TimeLine, lead: int) -> list[list[int]]:
    """due[stage][w]: position in the stage's program before which it encodes window w at the latest."""
    first_forward = {}
    for position, (is_backward, m) in enumerate(llm.programs[0]):
        if not is_backward:
            first_forward[m] = line.start[0][position]
    moments = [first_forward[max(0, members[0] - lead)] for members in windows]
    never = 1 + max(map(len, llm.programs))  # after the last window
    return [[*(bisect_left(starts, moment) for moment in moments), never] for starts in line.start]


def _tails(llm: LLMWork, encoder: EncoderWork) -> list[int]:
    """For each stage: its LLM and encoder forward work, and what has to follow the last of that: the last
    micro-batch's way back to stage 0 and, if it has media, its window's longest backward."""
    waits = encoder.backward and encoder.windows[-1][-1] == llm.micro_batches - 1
    tail = max(encoder.backward[-1]) if waits else 0
    encoding = [sum(column) for column in zip(*encoder.forward, strict=True)] or [0] * llm.stages
    tails = []
    for s, row in enumerate(llm.forward):
        tails.append(sum(row) + encoding[s])
        if llm.backward is not None:
            tails[-1] += sum(llm.backward[s]) + tail
            tail += llm.backward[s][-1]
    return tails


def _simulate(
    llm: LLMWork,
    encoder: EncoderWork,
    due: Sequence[Sequence[int]],
    live: int,
    overflow: int,
    limit: int,
) -> tuple[tuple[tuple[Action, ...], ...], tuple[tuple[tuple[int, int], ...], ...]] | None:
    """Actions and times of each stage, or None when the step will not end before `limit`.

    One loop over plain lists: planning a step spends much of its time here.
    """
    stages, count = llm.stages, llm.micro_batches
    layout = layout_of(stages, count, llm.backward is not None)
    ops, inputs, before, wakes, base = layout.ops, layout.inputs, layout.before, layout.wakes, layout.base
    actions, half, length = layout.actions, stages * count, len(layout.ops[0])
    cost = [c for row in (*llm.forward, *(llm.backward or ())) for c in row]
    ef, eb, windows = encoder.forward, encoder.backward, encoder.windows
    total, strict = len(windows), 1000 - overflow
    numbers = encoder.numbers or range(total)
    act_ef, act_eb = [Action(Kind.EF, n) for n in numbers], [Action(Kind.EB, n) for n in numbers]
    # end[op]: -1 until it has started. A window's is the latest over stages, once all have started it; a
    # stage without a share holds nobody up.
    missing = [sum([c > 0 for c in row]) for row in ef]
    end = [-1] * base + [-1 if n else 0 for n in missing] + [0]
    encoded = [0] * total
    source, last_of = [base + total] * count, [-1] * count
    for w, members in enumerate(windows):
        last_of[members[-1]] = w
        for m in members:
            source[m] = base + w
    inputs = (tuple([source[op] if op < count else i for op, i in zip(ops[0], inputs[0], strict=True)]),)
    inputs += layout.inputs[1:]
    released = [-1] * total
    left = _tails(llm, encoder)
    pc, ef_next, eb_next, asleep = [0] * stages, [0] * stages, [0] * stages, [False] * stages
    out: list[list[Action]] = [[] for _ in range(stages)]
    times: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
    # An event is a time and, in the low bits, the stage that is free then; an awake stage has one.
    bits = stages.bit_length()
    mask, heap = (1 << bits) - 1, list(range(1, stages))
    event = 0
    while True:
        now, s = event >> bits, event & mask
        position, w = pc[s], ef_next[s]
        has_llm = position < length
        ready = end[inputs[s][position]] if has_llm else -1
        is_due = position >= due[s][w]
        can_encode = back = run = False
        release = -1
        if has_llm and not is_due and 0 <= ready <= now:  # the usual case first
            run = True
        else:
            v = eb_next[s]
            can_encode = w < total and (eb is None or w - v < live)
            if eb is not None and v < w:
                release = released[v]
                back = 0 <= release <= now
            if w < total and (is_due or not has_llm):
                if can_encode:
                    back = False
                elif not back:
                    run = has_llm and 0 <= ready <= now
            elif has_llm and (can_encode or back):
                if ready >= 0:
                    room = 1000 * (ready - now)
                else:
                    i, room = inputs[s][position], 0
                    while i < base and end[i] < 0:
                        room += cost[i]
                        i = before[i]
                    if i < base:
                        room = max(0, end[i] + room - now)
                    room *= 1000
                can_encode = can_encode and strict * ef[w][s] <= room
                back = back and strict * eb[v][s] <= room
        if run:
            op = ops[s][position]
            pc[s] = position + 1
            spent, action, other = cost[op], actions[op], wakes[op]
            finish = end[op] = now + spent
            if other >= 0:
                if asleep[other]:
                    asleep[other] = False
                    heappush(heap, now << bits | other)
            elif op >= half and last_of[op - half] >= 0:
                released[last_of[op - half]] = finish
                for other in range(stages):
                    if asleep[other]:
                        asleep[other] = False
                        heappush(heap, now << bits | other)
        elif can_encode:
            spent, action = ef[w][s], act_ef[w]
            finish = now + spent
            ef_next[s] = w + 1
            if spent:
                encoded[w] = max(encoded[w], finish)
                missing[w] -= 1
                if not missing[w]:
                    end[base + w] = encoded[w]
                    if asleep[0]:
                        asleep[0] = False
                        heappush(heap, now << bits)
        elif back:
            spent, action = 0, act_eb[v]  # not in `left`, of which nothing is left behind the LLM's last op
            finish = now + eb[v][s]
            eb_next[s] = v + 1
        else:
            wake = release if ready <= now or now < release < ready else ready
            if wake > now:
                event = heappushpop(heap, wake << bits | s)
                continue
            asleep[s] = True
            if not heap:
                break
            event = heappop(heap)
            continue
        if spent:
            if now + left[s] >= limit:
                return None
            left[s] -= spent
        out[s].append(action)
        times[s].append((now, finish))
        event = heappushpop(heap, finish << bits | s)
    assert min(pc) == length and min(ef_next) == total, "scheduler stopped early"
    return tuple(map(tuple, out)), tuple(map(tuple, times))
