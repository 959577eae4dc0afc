"""Choosing window size, shares, lead and overflow by simulating candidates.

The search runs on a stylised step (even micro-batches, encoder work and imbalance on a logarithmic scale),
so that its result can be remembered: steps of one kind of data ask for the same few. It is a pure function
of integers. The first few of its ranking are then tried on the real step (step.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isqrt

from omni_ds.plan.base import LLMWork, TimeLine, time_line
from omni_ds.plan.capacity import share_targets
from omni_ds.plan.fill import EncoderWork, shorter_schedule, smallest_live
from omni_ds.plan.shares import cut_windows, deal_windows

UNIT = 1 << 16
# round(UNIT * 2 ** (k / 12)): integers, so that no machine's pow() rounds otherwise.
_OCTAVE = (65536, 69433, 73562, 77936, 82570, 87480, 92682, 98193, 104032, 110218, 116772, 123715)
COARSE = 3  # log_step is rounded down to multiples of it: steps of one kind share a search
# Candidates count as equal within one part in NEAR of the step and NEAR_ENCODER of a rank's encoder time.
NEAR, NEAR_ENCODER = 256, 32
HOPELESS = 125  # per cent of the best size's step: a size that takes longer is not searched
ALWAYS = 1000000  # an overflow that lets everything start in a bubble
ROBUST_OVERFLOW = 500
# (lead in micro-batches, None: as many as stages; overflow)
KNOBS = ((0, 0), (0, 500), (0, ALWAYS), (1, 500), (1, ALWAYS), (None, 500), (None, ALWAYS))
FEW_KNOBS = ((0, 0), (0, 500), (0, ALWAYS), (1, ALWAYS))  # for steps with more ops than
MANY_OPS = 256
# Standard normal quantiles (k + 1/2) / 32 in thousandths, shuffled: stylised items are as unequal as the
# real ones.
_QUANTILES = (-40, 1318, -776, 489, -2154, 197, 887, -1318, 40, -489, 1010, -1010, 2154, -118, -277, 402) + (
    -887,
    674,
    118,
    -1534,
    277,
    1676,
    -674,
    -402,
    1150,
    -197,
    776,
    -1150,
    580,
    -580,
    1534,
    -1676,
)


@dataclass(frozen=True)
class Choice:
    """window: micro-batches a window; unequal: shares follow idle time (capacity.py) instead of being even;
    lead, overflow, live as in list_schedule."""

    window: int
    unequal: bool
    lead: int
    overflow: int
    live: int

    def overflows(self) -> tuple[int, ...]:
        """Values of overflow to try on the real step: uneven loads want a little where even ones want
        none."""
        return tuple(dict.fromkeys((self.overflow, ROBUST_OVERFLOW)))


@dataclass(frozen=True)
class Shape:
    """A kind of step. encode, encode_back: encoder cost of a micro-batch over the LLM's forward cost of one
    stage, as log_step (encode_back None: nothing trained). items: of a micro-batch, rounded to a power of
    two, 0: divisible at will. spread: mean square over squared mean of their costs, as log_step. ranks: of
    a stage. live: bound on live windows, in micro-batches of the replica."""

    stages: int
    micro_batches: int
    encode: int
    encode_back: int | None
    items: int
    spread: int
    ranks: int
    live: int
    training: bool


def log_step(numerator: int, denominator: int) -> int:
    """12 log2(numerator / denominator), rounded down, in integers; at least -96 (0.4 %)."""
    if numerator <= 0 or denominator <= 0:
        return -96
    power = numerator**12 * (1 << 96) // denominator**12
    return max(-96, power.bit_length() - 1 - 96)


def round_step(step: int) -> int:
    """To the nearest multiple of COARSE."""
    return (step + COARSE // 2) // COARSE * COARSE


def from_log_step(step: int) -> int:
    """Inverse of log_step, in units of UNIT."""
    octave, k = divmod(step, 12)
    return _OCTAVE[k] << octave if octave >= 0 else _OCTAVE[k] >> -octave


def window_sizes(stages: int, micro_batches: int) -> tuple[int, ...]:
    """Powers of two up to twice the stages, at most the step; and the whole step."""
    sizes = [1]
    while sizes[-1] < min(2 * stages, micro_batches):
        sizes.append(min(2 * sizes[-1], micro_batches))
    return tuple(dict.fromkeys([*sizes, micro_batches]))


def measure_items(items: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Shape.items and Shape.spread of micro-batches with items of these costs; coarse, so that steps
    agree."""
    costs = [cost for mb in items for cost in mb if cost]
    if not costs:
        return 1, 0
    mean = max(1, len(costs) // len(items))
    spread = log_step(sum(cost * cost for cost in costs) * len(costs), sum(costs) ** 2)
    return 1 << min(6, mean.bit_length() - 1), max(0, spread) // COARSE * COARSE


@lru_cache(maxsize=4096)
def tune(shape: Shape) -> tuple[Choice, ...]:
    """Candidates by simulated step time, best first: the best knobs of each window size and kind of share.

    Sizes are screened with one setting; three are searched. Of equals larger windows come first (fewer,
    larger messages and encoder batches).
    """
    stages, count = shape.stages, shape.micro_batches
    forward = ((UNIT,) * count,) * stages
    llm = LLMWork(forward, ((2 * UNIT,) * count,) * stages if shape.training else None)
    line = time_line(llm)
    knobs = KNOBS if stages * count <= MANY_OPS else FEW_KNOBS
    works = {}
    screened = []
    for size in window_sizes(stages, count):
        if size > max(shape.live, 2 * stages):
            continue  # one window would hold more than may be alive
        windows = cut_windows(count, size)
        live = live_windows(windows, stages, shape.live)
        for unequal in (False, True):
            work = works[size, unequal] = _stylised(shape, llm, line, windows, unequal)
            choice = Choice(size, unequal, 0, 500, live)
            limit = min((entry[0] for entry in screened), default=1 << 62) * HOPELESS // 100
            length = _length(llm, work, line, choice, limit)
            if length < limit:
                screened.append((length, -size, unequal, choice))
    screened.sort(key=lambda entry: entry[:3])
    sizes = list(dict.fromkeys(choice.window for *_, choice in screened))[:3]
    ranking = []
    for length, size, unequal, screened_as in screened:
        choice = screened_as
        if choice.window in sizes:
            others = [
                replace(choice, lead=stages if lead is None else lead, overflow=overflow)
                for lead, overflow in knobs
            ]
            for other in dict.fromkeys(others):
                if other == screened_as:
                    continue
                found = _length(llm, works[-size, unequal], line, other, length)
                if found < length:
                    length, choice = found, other
        ranking.append((length, size, unequal, choice))
    encoding = count * (from_log_step(shape.encode) + from_log_step(shape.encode_back or -96)) // stages
    grain = max(1, min(min(entry[0] for entry in ranking) // NEAR, encoding // NEAR_ENCODER))
    ranking.sort(key=lambda entry: (entry[0] // grain, *entry[1:3], entry[0]))
    return tuple(entry[-1] for entry in ranking)


def _length(llm: LLMWork, work: EncoderWork, line: TimeLine, choice: Choice, limit: int) -> int:
    """Simulated step time, or `limit` if it is not shorter."""
    schedule = shorter_schedule(
        llm, work, line, lead=choice.lead, live=choice.live, overflow=choice.overflow, limit=limit
    )
    return limit if schedule is None else schedule.length


def _stylised(
    shape: Shape, llm: LLMWork, line: TimeLine, windows: Sequence[Sequence[int]], unequal: bool
) -> EncoderWork:
    """Encoder work of a step of this shape: log-normal items of the given spread, dealt as real ones are."""
    each, back = from_log_step(shape.encode), shape.encode_back
    back = None if back is None else from_log_step(back)
    whole = [each * len(members) for members in windows]
    whole_back = None if back is None else [back * len(members) for members in windows]
    rooms = None
    if unequal:
        rooms = share_targets(llm, line, windows, whole, whole_back)
    if not shape.items:
        forward = rooms or [[cost // shape.stages] * shape.stages for cost in whole]
    else:
        # variance of the logarithm, in steps: 12 / ln 2 times the step of the spread
        deviation = isqrt(1731 * shape.spread // 100)
        costs = [from_log_step(deviation * z // 1000) for z in _QUANTILES]
        members = [
            [costs[(m * shape.items + i) % len(costs)] for m in window for i in range(shape.items)]
            for window in windows
        ]
        unit = sum(costs) * shape.items // len(costs)  # of an average micro-batch
        per_rank = rooms and [[part for part in row for _ in range(shape.ranks)] for row in rooms]
        dealt = deal_windows(members, shape.stages * shape.ranks, per_rank)
        forward = []
        for window, parts in zip(members, dealt, strict=True):
            loads = [sum(window[i] for i in part) for part in parts]
            lanes = [loads[s * shape.ranks : (s + 1) * shape.ranks] for s in range(shape.stages)]
            forward.append([max(lane) * each * shape.ranks // unit for lane in lanes])
    forward = tuple(map(tuple, forward))
    backward = None
    if back is not None:
        backward = tuple(tuple(cost * back // max(1, each) for cost in row) for row in forward)
    return EncoderWork(tuple(map(tuple, windows)), forward, backward)


def live_windows(windows: Sequence[Sequence[int]], stages: int, micro_batches: int) -> int:
    """Bound on live windows for a bound in micro-batches of the replica; never less than 1F1B needs."""
    size = max((len(members) for members in windows), default=1)
    return max(smallest_live(tuple(map(tuple, windows)), stages), micro_batches // size)
