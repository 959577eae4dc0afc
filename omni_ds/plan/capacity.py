"""How much of each window a stage should encode: more where it would idle, so that shares are unequal on
purpose.

Fluid model on the LLM-only time line. A stage idles for known intervals. Encoder forwards of window w fit
into those before its first consumer starts on stage 0, its backwards into those after stage 0 has gone back
through its last micro-batch. What does not fit makes every stage pause, by the same time for all. For each
window the split that needs the shortest pauses is found; windows are taken from both ends of the step
inwards, because those in the middle can use the idle time of either end, and each takes only what the
windows nearer to that end leave.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from omni_ds.plan.base import LLMWork, TimeLine


class Idle:
    """Idle time of a stage: `before(t)`, `after(t)`."""

    def __init__(self, starts: Sequence[int], ends: Sequence[int], length: int):
        self.moments, self.spent = [0], [0]  # idle time spent up to moments[i], which ends an interval
        self.length = length
        at = total = 0
        self.intervals = []
        for start, end in zip([*starts, length], [*ends, length], strict=True):
            if start > at:
                self.intervals.append((at, start, total))
                total += start - at
            at = end
        self.total = total
        self.begins = [begin for begin, _, _ in self.intervals]

    def before(self, moment: int) -> int:
        i = bisect_right(self.begins, moment) - 1
        if i < 0:
            return 0
        begin, end, earlier = self.intervals[i]
        return earlier + min(moment, end) - begin

    def after(self, moment: int) -> int:
        return self.total - self.before(moment)


def share_targets(
    llm: LLMWork,
    line: TimeLine,
    windows: Sequence[Sequence[int]],
    forward: Sequence[int],
    backward: Sequence[int] | None,
) -> list[list[int]]:
    """Encoder forward cost each stage should take of each window: [window][stage], rows add up to `forward`.

    forward[w], backward[w]: cost of the whole window over the ranks of a stage (total / lanes).
    """
    stages, last = llm.stages, len(windows) - 1
    idle = [Idle(line.start[s], line.end[s], line.length) for s in range(stages)]
    first_start, last_end = {}, {}
    for (is_backward, m), start, end in zip(llm.programs[0], line.start[0], line.end[0], strict=True):
        if is_backward:
            last_end[m] = end
        else:
            first_start[m] = start
    early = [[idle[s].before(first_start[members[0]]) for members in windows] for s in range(stages)]
    late = None
    if backward is not None:
        late = [[idle[s].after(last_end[members[-1]]) for members in windows] for s in range(stages)]
    # Windows not done yet have all lost the same, and the next one at either end has least of them (moments
    # are in window order); of those done at the far end only the least counts.
    spent_early, spent_late = [0] * stages, [0] * stages
    done_early, done_late = [1 << 200] * stages, [1 << 200] * stages
    targets: list[list[int]] = [[] for _ in windows]
    order = [w for i in range(last // 2 + 1) for w in dict.fromkeys((i, last - i))]
    for w in order:
        if not forward[w]:
            targets[w] = [0] * stages
            continue
        least = [min(row[w] - x, y) for row, x, y in zip(early, spent_early, done_early, strict=True)]
        before = [max(0, x) for x in least]
        mine = after = None
        price = 0
        if late is not None:
            mine = [row[w] - x for row, x in zip(late, spent_late, strict=True)]
            if backward[w]:
                # at least 1: a backward pass of next to nothing (a small projector) still has its room
                price = max(1, 1000 * backward[w] // forward[w])
                after = [max(0, min(x, y)) * 1000 // price for x, y in zip(mine, done_late, strict=True)]
        row = split(before, after, price, forward[w])
        at_start = 2 * w <= last
        for s, share in enumerate(row):
            used = min(share, before[s])
            if at_start:
                spent_early[s] += used
                done_early[s] -= used
            else:
                done_early[s] = least[s] - used
            if mine is not None:
                used = min(share * backward[w] // forward[w], mine[s])
                if at_start:
                    done_late[s] = min(mine[s], done_late[s]) - used
                else:
                    spent_late[s] += used
                    done_late[s] -= used
        targets[w] = row
    return targets


def split(before: Sequence[int], after: Sequence[int] | None, price: int, total: int) -> list[int]:
    """Shares that add up to `total` with the least pause x + price / 1000 * y.

    Stage s can take min(before[s] + x, after[s] + y) without further loss; x and y are raised, whichever
    gains most for its price, until everything is placed.
    """
    count = len(before)
    if after is None:
        after, price = [1 << 62] * count, 1 << 40
    x = y = 0
    while True:
        room = [min(b + x, a + y) for b, a in zip(before, after, strict=True)]
        missing = total - sum(room)
        if missing <= 0:
            break
        gaps = [(a + y) - (b + x) for b, a in zip(before, after, strict=True)]
        by_x, by_y = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
        # Stages that a unit of pause lets take more: by_x / 1, by_y / price, count / (1 + price); common
        # denominator.
        gain_x, gain_y = by_x * price * (1000 + price), by_y * 1000 * (1000 + price)
        gain_both = count * price * 1000
        if gain_x >= max(gain_y, gain_both):
            step = min(min(gap for gap in gaps if gap > 0), -(-missing // by_x))
            x += step
        elif gain_y >= gain_both:
            step = min(min(-gap for gap in gaps if gap < 0), -(-missing // by_y))
            y += step
        else:
            step = -(-missing // count)
            x, y = x + step, y + step
    # Room to spare is left in proportion, so that no stage is used up early.
    whole = sum(room)
    row = [total * r // whole for r in room]
    row[row.index(max(row))] += total - sum(row)
    return row
