"""The LLM's programs as flat tables of op numbers: the same for all steps of one shape, made once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from omni_ds.plan.actions import Action, Kind
from omni_ds.plan.base import LLMWork


@dataclass(frozen=True)
class Layout:
    """Numbers of LLM ops, the same for all steps of one shape: forward (s, m) is s * count + m, backwards
    follow. Behind them come the windows, as inputs of stage 0, and `base + windows`: no input at all.

    ops[s][position], inputs[s][position]: the op and the one it waits for (windows: 0 stands in); before[op]:
    the same by op, `base` for none; wakes[op]: stage that may wait for it, -1 for none.
    """

    ops: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[int, ...], ...]
    before: tuple[int, ...]
    wakes: tuple[int, ...]
    actions: tuple[Action, ...]
    base: int


@lru_cache(maxsize=64)
def layout_of(stages: int, count: int, backward: bool) -> Layout:
    programs = LLMWork(((0,) * count,) * stages, ((0,) * count,) * stages if backward else None).programs
    half, base = stages * count, (1 + backward) * stages * count
    before = [base] * count + list(range(half - count))
    wakes = [s + 1 if s + 1 < stages else -1 for s in range(stages) for _ in range(count)]
    actions = [Action(Kind.F, m) for _ in range(stages) for m in range(count)]
    if backward:
        before += [half + count + i for i in range(half - count)] + [half - count + m for m in range(count)]
        wakes += [s - 1 for s in range(stages) for _ in range(count)]
        actions += [Action(Kind.B, m) for _ in range(stages) for m in range(count)]
    ops = tuple(
        tuple(half * is_backward + s * count + m for is_backward, m in program)
        for s, program in enumerate(programs)
    )
    inputs = tuple(tuple(before[op] for op in row) for row in ops)
    return Layout(ops, inputs, tuple(before), tuple(wakes), tuple(actions), base)
