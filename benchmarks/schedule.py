"""How close schedules come to the bound max(LLM-only 1F1B, total work / stages), by simulation.

One replica, one rank a stage; forward 1 and backward 2 per stage and micro-batch, encoder loads log-normal
with the given mean (forward, twice that backward), each micro-batch's load in `--items` log-normal items
(0: divisible). Micro-batches are ordered as
planning orders them, little encoder work at both ends, for every policy.

    python benchmarks/schedule.py [--json PATH] [--items N] [--seeds N]

Policies: joint (bubbles first, then uniform; what training runs), first_stage (encoders inline on stage 0),
encoders_first (all encoding before the pipeline, all of its backward after), uniform (pauses on all stages,
no bubble filling). encoder_hidden: share of a rank's encoder time that does not lengthen the LLM-only step.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from anywhere, without an install

from omni_ds.plan.base import LLMWork, time_line
from omni_ds.plan.batch import light_ends
from omni_ds.plan.capacity import share_targets
from omni_ds.plan.fill import EncoderWork
from omni_ds.plan.schedule import first_stage, joint, uniform
from omni_ds.plan.shares import cut_windows, deal_windows
from omni_ds.plan.tune import COARSE, Shape, log_step, measure_items, tune
from omni_ds.plan.weave import LIVE_AT_LEAST, MOST_TRIES, TRIED_OPS

STAGES = (2, 4, 8, 16)
MICRO_BATCHES = (2, 4, 8)  # times stages
RATIOS = (0.05, 0.1, 0.3, 1.0, 3.0)
UNIT = 1_000_000
POLICIES = ("joint", "first_stage", "encoders_first", "uniform")


@dataclass(frozen=True)
class Case:
    """LLM work and the encoder items (forward cost) of each micro-batch."""

    llm: LLMWork
    items: tuple[tuple[int, ...], ...]

    @property
    def bound(self) -> int:
        stages = self.llm.stages
        total = self.llm.total + 3 * sum(map(sum, self.items))
        return max(time_line(self.llm).length, -(-total // stages))


def make_case(stages: int, count: int, ratio: float, items: int, seed: int) -> Case:
    rng = random.Random(seed)
    llm = LLMWork(((UNIT,) * count,) * stages, ((2 * UNIT,) * count,) * stages)
    loads = [rng.lognormvariate(0, 1) for _ in range(count)]
    scale = ratio * stages * UNIT * count / sum(loads)
    split = []
    for load in loads:
        parts = [rng.lognormvariate(0, 1) for _ in range(max(1, items))]
        split.append(tuple(max(1, int(load * scale * part / sum(parts))) for part in parts))
    order = light_ends([sum(parts) for parts in split], [0] * count)  # as planning orders micro-batches
    return Case(llm, tuple(split[m] for m in order))


def shares(case: Case, windows, divisible: bool, rooms=None) -> EncoderWork:
    """Windows dealt to stages, to the last unit when divisible, otherwise in whole items as training does."""
    stages = case.llm.stages
    costs = [[cost for m in members for cost in case.items[m]] for members in windows]
    if divisible:
        forward = rooms or [[sum(window) // stages] * stages for window in costs]
    else:
        dealt = deal_windows(costs, stages, rooms)
        forward = [
            [sum(window[i] for i in part) for part in parts]
            for window, parts in zip(costs, dealt, strict=True)
        ]
    forward = tuple(map(tuple, forward))
    return EncoderWork(windows, forward, tuple(tuple(2 * c for c in row) for row in forward))


def run_policy(policy: str, case: Case, items: int) -> int:
    """Step time."""
    llm, stages, count = case.llm, case.llm.stages, case.llm.micro_batches
    if policy == "joint":
        return run_joint(case, items)
    if policy == "first_stage":
        totals = tuple(sum(costs) for costs in case.items)
        forward = tuple((total,) + (0,) * (stages - 1) for total in totals)
        encoder = EncoderWork(cut_windows(count, 1), forward, tuple((2 * r[0], *r[1:]) for r in forward))
        return first_stage(llm, encoder).length
    if policy == "encoders_first":
        encoder = shares(case, (tuple(range(count)),), items == 0)
        return time_line(llm).length + max(encoder.forward[0]) + max(encoder.backward[0])
    best = None
    for size in (1, 2, stages):
        encoder = shares(case, cut_windows(count, size), items == 0)
        for lead in (0, 1, stages):
            length = uniform(llm, encoder, lead=lead).length
            best = length if best is None else min(best, length)
    return best


def run_joint(case: Case, items: int) -> int:
    """As omni_ds/plan/weave.py does it: the search's best candidates, tried on the real loads."""
    llm, stages, count = case.llm, case.llm.stages, case.llm.micro_batches
    total, forward = sum(map(sum, case.items)), sum(map(sum, llm.forward))
    each, spread = measure_items(case.items) if items else (0, 0)
    shape = Shape(
        stages=stages,
        micro_batches=count,
        encode=log_step(total * stages, forward) // COARSE * COARSE,
        encode_back=log_step(2 * total * stages, forward) // COARSE * COARSE,
        items=each,
        spread=spread,
        ranks=1,
        live=stages * max(stages, LIVE_AT_LEAST),
        training=True,
    )
    line, best = time_line(llm), None
    for choice in tune(shape)[: max(1, min(MOST_TRIES, TRIED_OPS // (stages * count)))]:
        windows = cut_windows(count, choice.window)
        whole = [sum(sum(case.items[m]) for m in members) for members in windows]
        rooms = None
        if choice.unequal:
            rooms = share_targets(llm, line, windows, whole, [2 * cost for cost in whole])
        encoder = shares(case, windows, items == 0, rooms)
        for overflow in choice.overflows():
            schedule = joint(llm, encoder, lead=choice.lead, live=choice.live, overflow=overflow, line=line)
            best = schedule.length if best is None else min(best, schedule.length)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--items", type=int, default=0, help="items a micro-batch; 0: divisible loads")
    parser.add_argument("--seeds", type=int, default=3, help="draws of the loads; the median is reported")
    parser.add_argument("--stages", type=int, nargs="*", default=STAGES)
    args = parser.parse_args()
    started = time.perf_counter()
    print(f"{'P':>3} {'M':>4} {'ratio':>5}  " + "  ".join(f"{policy:>22}" for policy in POLICIES))
    print(" " * 16 + "  ".join(f"{'step/bound':>12} {'hidden':>9}" for _ in POLICIES))
    rows = []
    for stages in args.stages:
        for times in MICRO_BATCHES:
            for ratio in RATIOS:
                cells = []
                for policy in POLICIES:
                    over, hidden = [], []
                    for seed in range(args.seeds):
                        case = make_case(stages, times * stages, ratio, args.items, seed)
                        length = run_policy(policy, case, args.items)
                        encoding = 3 * sum(map(sum, case.items)) / stages
                        over.append(length / case.bound)
                        hidden.append(1 - (length - time_line(case.llm).length) / encoding)
                    row = {
                        "stages": stages,
                        "micro_batches": times * stages,
                        "encoder_ratio": ratio,
                        "policy": policy,
                        "step_over_bound": statistics.median(over),
                        "step_over_bound_worst": max(over),
                        "encoder_hidden": statistics.median(hidden),
                        "encoder_hidden_worst": min(hidden),
                    }
                    rows.append(row)
                    cells.append(f"{row['step_over_bound']:>12.3f} {100 * row['encoder_hidden']:>7.0f} %")
                print(f"{stages:>3} {times * stages:>4} {ratio:>5}  " + "  ".join(cells), flush=True)
    print()
    for policy in POLICIES:
        mine = [row for row in rows if row["policy"] == policy]
        over = [row["step_over_bound"] for row in mine]
        draw = max(row["step_over_bound_worst"] for row in mine)
        print(
            f"{policy}: step / bound mean {statistics.mean(over):.4f}, worst median {max(over):.4f}, "
            f"worst draw {draw:.4f}"
        )
    small = [
        row
        for row in rows
        if row["policy"] == "joint"
        and row["encoder_ratio"] == 0.1
        and row["micro_batches"] == 4 * row["stages"]
    ]
    print(
        "joint, encoder:LLM 0.1, M = 4P: encoder time hidden (worst draw) "
        + ", ".join(
            f"P={r['stages']}: {100 * r['encoder_hidden']:.0f} ({100 * r['encoder_hidden_worst']:.0f}) %"
            for r in small
        )
    )
    print(
        f"{args.seeds} draws, items {args.items or 'divisible'}, Python {platform.python_version()}, "
        f"{time.perf_counter() - started:.0f} s"
    )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
