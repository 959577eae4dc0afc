"""Choosing window size, lead and overflow by simulating candidates.

The search runs on a stylised step (even micro-batches, encoder work in steps of a twelfth of an octave,
equal items), so that its result can be remembered: steps of one kind of data ask for the same few. It is a
pure function of integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from omni_ds.plan.base import LLMWork, time_line
from omni_ds.plan.fill import EncoderWork, list_schedule, smallest_live
from omni_ds.plan.shares import cut_windows

UNIT = 1 << 16
# round(UNIT * 2 ** (k / 12)): integers, so that no machine's pow() rounds otherwise.
_OCTAVE = (65536, 69433, 73562, 77936, 82570, 87480, 92682, 98193, 104032, 110218, 116772, 123715)
OVERFLOWS = (500, 1000000)


@dataclass(frozen=True)
class Choice:
    """window: micro-batches a window; lead, overflow, live as in list_schedule."""

    window: int
    lead: int
    overflow: int
    live: int


@dataclass(frozen=True)
class Shape:
    """A kind of step. encode, encode_back: encoder cost of a micro-batch over the LLM's forward cost of one
    stage, as steps of a logarithmic scale (None: none); items: items a micro-batch, a power of two; live:
    bound in micro-batches of the replica."""

    stages: int
    ranks: int
    micro_batches: int
    encode: int
    encode_back: int | None
    items: int
    live: int
    training: bool


def log_step(numerator: int, denominator: int) -> int:
    """round-down of 12 log2(numerator / denominator), in integers; at least -96 (0.4 %)."""
    if numerator <= 0 or denominator <= 0:
        return -96
    power = numerator**12 * (1 << 96) // denominator**12
    return max(-96, power.bit_length() - 1 - 96)


def from_log_step(step: int) -> int:
    """Inverse of log_step, in units of UNIT."""
    octave, k = divmod(step, 12)
    return _OCTAVE[k] << octave if octave >= 0 else _OCTAVE[k] >> -octave


@lru_cache(maxsize=4096)
def tune(shape: Shape) -> Choice:
    """The candidate with the shortest simulated step; ties go to larger windows (fewer, larger messages)."""
    count, stages = shape.micro_batches, shape.stages
    forward = ((UNIT,) * count,) * stages
    llm = LLMWork(forward, ((2 * UNIT,) * count,) * stages if shape.training else None)
    line = time_line(llm)
    best = None
    for size in window_sizes(stages, count):
        windows = cut_windows(count, size)
        live = max(smallest_live(windows, stages), shape.live // size)
        ef = _per_rank(from_log_step(shape.encode), windows, shape)
        eb = (
            None if shape.encode_back is None else _per_rank(from_log_step(shape.encode_back), windows, shape)
        )
        for lead in sorted({0, 1, 2, stages}):
            for overflow in OVERFLOWS:
                schedule = list_schedule(
                    llm, EncoderWork(windows, ef, eb), line, lead=lead, live=live, overflow=overflow
                )
                key = (schedule.length, -size, lead, overflow)
                if best is None or key < best[0]:
                    best = key, Choice(size, lead, overflow, live)
    return best[1]


def window_sizes(stages: int, micro_batches: int) -> tuple[int, ...]:
    """Powers of two up to twice the stages, at most the step."""
    sizes = [1]
    while sizes[-1] < min(2 * stages, micro_batches):
        sizes.append(min(2 * sizes[-1], micro_batches))
    return tuple(sizes)


def _per_rank(cost: int, windows: tuple[tuple[int, ...], ...], shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Share of a rank of each window when its equal items are dealt out: whole items, so the fullest rank
    counts."""
    rows = []
    for members in windows:
        items = max(1, shape.items * len(members))
        rows.append((cost * len(members) * -(-items // shape.ranks) // items,) * shape.stages)
    return tuple(rows)
