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

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from omni_ds.plan.actions import Action, Kind
from omni_ds.plan.base import LLMWork, TimeLine


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
    return _Weaver(llm, encoder, line, lead, live, overflow).run()


class _Weaver:
    def __init__(
        self, llm: LLMWork, encoder: EncoderWork, line: TimeLine, lead: int, live: int, overflow: int
    ):
        self.f, self.b = llm.forward, llm.backward
        self.stages, self.count = llm.stages, llm.micro_batches
        self.programs = llm.programs
        self.ef, self.eb = encoder.forward, encoder.backward
        self.windows = encoder.windows
        numbers = [encoder.number(w) for w in range(len(encoder.windows))]
        self.act_f = [Action(Kind.F, m) for m in range(llm.micro_batches)]
        self.act_b = [Action(Kind.B, m) for m in range(llm.micro_batches)]
        self.act_ef = [Action(Kind.EF, number) for number in numbers]
        self.act_eb = [Action(Kind.EB, number) for number in numbers]
        self.overflow = overflow
        self.live = (
            max(live, smallest_live(encoder.windows, self.stages))
            if self.eb is not None
            else len(self.windows)
        )
        self.due = self._due_points(line, lead)
        stages = range(self.stages)
        self.pc, self.ef_next, self.eb_next = [0] * self.stages, [0] * self.stages, [0] * self.stages
        self.f_end: list[list[int]] = [[-1] * self.count for _ in stages]
        self.b_end: list[list[int]] = [[-1] * self.count for _ in stages]
        self.window_of = [-1] * self.count
        for w, members in enumerate(self.windows):
            for m in members:
                self.window_of[m] = w
        self.encoded = [0] * len(self.windows)  # latest end over the stages that have started it
        # A stage without a share holds nobody up.
        self.missing = [sum(cost > 0 for cost in row) for row in self.ef]
        self.last_of = {members[-1]: w for w, members in enumerate(self.windows)}
        self.released = [-1] * len(self.windows)
        self.out: list[list[Action]] = [[] for _ in stages]
        self.times: list[list[tuple[int, int]]] = [[] for _ in stages]
        self.asleep = [False] * self.stages
        self.heap: list[tuple[int, int]] = [(0, s) for s in stages]

    def _due_points(self, line: TimeLine, lead: int) -> list[list[int]]:
        """due[stage][w]: position in the stage's program before which it encodes window w at the latest."""
        first_forward = {}
        for position, (is_backward, m) in enumerate(self.programs[0]):
            if not is_backward:
                first_forward[m] = line.start[0][position]
        moments = [first_forward[max(0, members[0] - lead)] for members in self.windows]
        never = 1 + max(map(len, self.programs))  # after the last window
        return [
            [*(bisect_left(line.start[s], moment) for moment in moments), never] for s in range(self.stages)
        ]

    def run(self) -> Schedule:
        heap = self.heap
        while heap:
            now, stage = heapq.heappop(heap)
            self.asleep[stage] = False
            self._decide(stage, now)
        left = sum(len(p) - c for p, c in zip(self.programs, self.pc, strict=True))
        assert not left and min(self.ef_next) == len(self.windows), "scheduler stopped early"
        return Schedule(tuple(map(tuple, self.out)), tuple(map(tuple, self.times)), self.live)

    def _decide(self, stage: int, now: int) -> None:
        position, w = self.pc[stage], self.ef_next[stage]
        program = self.programs[stage]
        has_llm = position < len(program)
        ready = None
        if has_llm and position < self.due[stage][w]:  # the usual case first
            ready = self._ready(stage, position)
            if ready is not None and ready <= now:
                return self._run_llm(stage, position, now)
        v = self.eb_next[stage]
        can_encode = w < len(self.windows) and (self.eb is None or w - v < self.live)
        release = self.released[v] if self.eb is not None and v < w else -1
        if w < len(self.windows) and (not has_llm or position >= self.due[stage][w]):
            if can_encode:
                return self._encode(stage, w, now)
            if 0 <= release <= now:
                return self._encode_backward(stage, v, now)
            if has_llm:
                ready = self._ready(stage, position)
                if ready is not None and ready <= now:
                    return self._run_llm(stage, position, now)
        back = 0 <= release <= now
        if has_llm and (can_encode or back):
            room = (ready if ready is not None else self._earliest(stage, position, now)) - now
        if can_encode and (not has_llm or self._fits(self.ef[w][stage], room)):
            return self._encode(stage, w, now)
        if back and (not has_llm or self._fits(self.eb[v][stage], room)):
            return self._encode_backward(stage, v, now)
        wake = [t for t in (ready, release) if t is not None and t > now]
        if wake:
            heapq.heappush(self.heap, (min(wake), stage))
        else:
            self.asleep[stage] = True
        return None

    def _fits(self, cost: int, room: int) -> bool:
        return 1000 * cost <= 1000 * room + self.overflow * cost

    def _ready(self, stage: int, position: int) -> int | None:
        """When the inputs of an LLM op are there; None while one of their producers has not started."""
        is_backward, m = self.programs[stage][position]
        if is_backward:
            end = self.b_end[stage + 1][m] if stage < self.stages - 1 else self.f_end[stage][m]
            return None if end < 0 else end
        if stage:
            end = self.f_end[stage - 1][m]
            return None if end < 0 else end
        w = self.window_of[m]
        if w < 0:
            return 0
        return None if self.missing[w] else self.encoded[w]

    def _earliest(self, stage: int, position: int, now: int) -> int:
        """A lower bound on when the inputs can be there, through the producers that have not started yet."""
        is_backward, m = self.programs[stage][position]
        chain = 0
        if is_backward:
            s = stage + 1
            while s < self.stages:
                if self.b_end[s][m] >= 0:
                    return max(now, self.b_end[s][m] + chain)
                chain += self.b[s][m]
                s += 1
            stage = self.stages
        s = stage - 1
        while s >= 0:
            if self.f_end[s][m] >= 0:
                return max(now, self.f_end[s][m] + chain)
            chain += self.f[s][m]
            s -= 1
        return now + chain

    def _emit(self, stage: int, action: Action, start: int, cost: int) -> int:
        end = start + cost
        self.out[stage].append(action)
        self.times[stage].append((start, end))
        heapq.heappush(self.heap, (end, stage))
        return end

    def _wake(self, stage: int, time: int) -> None:
        if self.asleep[stage]:
            self.asleep[stage] = False
            heapq.heappush(self.heap, (time, stage))

    def _encode(self, stage: int, w: int, now: int) -> None:
        end = self._emit(stage, self.act_ef[w], now, self.ef[w][stage])
        self.ef_next[stage] += 1
        if self.ef[w][stage]:
            self.encoded[w] = max(self.encoded[w], end)
            self.missing[w] -= 1
            if not self.missing[w]:
                self._wake(0, now)

    def _encode_backward(self, stage: int, w: int, now: int) -> None:
        self._emit(stage, self.act_eb[w], now, self.eb[w][stage])
        self.eb_next[stage] += 1

    def _run_llm(self, stage: int, position: int, now: int) -> None:
        is_backward, m = self.programs[stage][position]
        self.pc[stage] += 1
        if is_backward:
            end = self._emit(stage, self.act_b[m], now, self.b[stage][m])
            self.b_end[stage][m] = end
            if stage:
                self._wake(stage - 1, now)
            elif m in self.last_of:
                self.released[self.last_of[m]] = end
                for other in range(self.stages):
                    self._wake(other, now)
        else:
            end = self._emit(stage, self.act_f[m], now, self.f[stage][m])
            self.f_end[stage][m] = end
            if stage < self.stages - 1:
                self._wake(stage + 1, now)
