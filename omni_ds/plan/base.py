"""The LLM's base schedule, 1F1B (Narayanan et al., PipeDream-Flush, arXiv 2104.04473), and its time line.

An LLM program is a list of (is_backward, micro_batch) per stage. The time line is what the LLM alone would
do: start and end of every op, from which the encoder windows learn where stages idle and where pauses cost
the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

Op = tuple[bool, int]


@lru_cache(maxsize=64)
def one_f_one_b(stages: int, micro_batches: int) -> tuple[tuple[Op, ...], ...]:
    """Stage s runs stages - s forwards ahead, then alternates backward and forward, then drains."""
    programs = []
    for stage in range(stages):
        warm_up = min(stages - stage, micro_batches)
        program: list[Op] = [(False, m) for m in range(warm_up)]
        for m in range(micro_batches):
            program.append((True, m))
            if warm_up + m < micro_batches:
                program.append((False, warm_up + m))
        programs.append(tuple(program))
    return tuple(programs)


@lru_cache(maxsize=64)
def forward_only(stages: int, micro_batches: int) -> tuple[tuple[Op, ...], ...]:
    return tuple(tuple((False, m) for m in range(micro_batches)) for _ in range(stages))


@dataclass(frozen=True)
class LLMWork:
    """Integer costs of one replica's LLM: forward[stage][micro_batch]; backward likewise, None when there
    is none."""

    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...] | None = None

    @property
    def stages(self) -> int:
        return len(self.forward)

    @property
    def micro_batches(self) -> int:
        return len(self.forward[0])

    @property
    def programs(self) -> tuple[tuple[Op, ...], ...]:
        base = forward_only if self.backward is None else one_f_one_b
        return base(self.stages, self.micro_batches)

    @property
    def total(self) -> int:
        return sum(map(sum, self.forward)) + (0 if self.backward is None else sum(map(sum, self.backward)))


@dataclass(frozen=True)
class TimeLine:
    """start[stage][op] and end[stage][op] of the LLM's programs; length: end of the last op."""

    start: tuple[tuple[int, ...], ...]
    end: tuple[tuple[int, ...], ...]

    @property
    def length(self) -> int:
        return max(ends[-1] for ends in self.end)


@lru_cache(maxsize=64)
def _topological(stages: int, micro_batches: int, backward: bool) -> tuple[tuple[int, int], ...]:
    """(stage, op position) in an order in which every op follows what it needs."""
    programs = (one_f_one_b if backward else forward_only)(stages, micro_batches)
    done: set[tuple[int, bool, int]] = set()
    position = [0] * stages
    order = []
    total = sum(map(len, programs))
    while len(order) < total:
        for stage in range(stages):
            while position[stage] < len(programs[stage]):
                is_backward, m = programs[stage][position[stage]]
                if is_backward:
                    need = (stage + 1, True, m) if stage < stages - 1 else (stage, False, m)
                else:
                    need = (stage - 1, False, m)
                if need[0] >= 0 and need not in done:
                    break
                done.add((stage, is_backward, m))
                order.append((stage, position[stage]))
                position[stage] += 1
    return tuple(order)


def time_line(work: LLMWork) -> TimeLine:
    """When each op runs if the LLM runs alone."""
    stages, count = work.stages, work.micro_batches
    programs, forward, backward = work.programs, work.forward, work.backward
    start = [[0] * len(program) for program in programs]
    end = [[0] * len(program) for program in programs]
    free = [0] * stages
    forward_end = [[0] * count for _ in range(stages)]
    backward_end = [[0] * count for _ in range(stages)]
    for stage, position in _topological(stages, count, backward is not None):
        is_backward, m = programs[stage][position]
        begin = free[stage]
        if is_backward:
            if stage < stages - 1:
                begin = max(begin, backward_end[stage + 1][m])
            finish = backward_end[stage][m] = begin + backward[stage][m]
        else:
            if stage:
                begin = max(begin, forward_end[stage - 1][m])
            finish = forward_end[stage][m] = begin + forward[stage][m]
        start[stage][position], end[stage][position] = begin, finish
        free[stage] = finish
    return TimeLine(tuple(map(tuple, start)), tuple(map(tuple, end)))
