"""Step time with one giant image in every window, with and without slices: measured, with real processes.

8 ranks run the real step executor over gloo; compute sleeps as long as its modelled work takes, messages have
the planned shapes and are checked (benchmarks/emulate.py), and ranks of a gang wait for each other.

    python benchmarks/long_short.py [--seconds 4] [--repeats 3] [--json PATH]

Cases by mesh: off (omni.encoder_parallel.long_short "off") and auto; the images are the same. A slice costs
an eighth more than an equal part of its image (omni_ds/plan/cost.py), in the plan and here. `encoder`:
encoder load of the dearest rank over the mean; `gang`: ranks that encode a giant together, neighbours of one
stage. Giants of several windows keep several ranks busy at once without slices too, and with many stages few
ranks are neighbours: less is gained.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from anywhere, without an install

from emulate import HIDDEN, LLM, VISION

from omni_ds.config.parts import EncoderConfig
from omni_ds.plan.build import Plan, PlanOptions, build_plan, build_step
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.llm_meta import LLMMeta
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.sample import Item, SampleMeta

MESHES = ((1, 8), (2, 4), (4, 2))  # stages, replicas
TOKENS = 6144  # of a micro-batch, at most
GIANT = 2048  # pixels of a side
SAMPLES = 6  # of a micro-batch, on average


def make_plan(stages: int, replicas: int, long_short: str) -> Plan:
    section = EncoderConfig(
        config=VISION, modality="image", projector={"reduction": "pixel_shuffle", "factor": 2}
    )
    vision = EncoderMeta.from_config("vision", section, VISION, HIDDEN)
    options = PlanOptions(
        max_tokens_per_micro_batch=TOKENS, micro_batches=max(2, stages), long_short=long_short
    )
    return build_plan(LLMMeta.from_config(LLM), (vision,), Mesh(stages, replicas), options)


def make_samples(plan: Plan, giants: int, seed: int) -> tuple[SampleMeta, ...]:
    """Texts with up to four small images each; the first `giants` samples have a giant instead."""
    rng, meta = random.Random(seed), plan.encoders[0]
    samples = []
    for row in range(SAMPLES * plan.options.micro_batches * plan.mesh.data):
        sides = [(GIANT, GIANT)]
        if row >= giants:
            sides = [
                (32 * rng.randint(3, 7), 32 * rng.randint(3, 7))
                for _ in range(rng.choice((0, 0, 1, 1, 2, 4)))
            ]
        items, offset = [], 4
        for ordinal, shape in enumerate(sides):
            segments, rows = meta.measure(shape)
            items.append(Item(row, ordinal, meta.name, shape, segments, rows, ((offset, rows),)))
            offset += rows + 1
        text = max(16, min(600, int(200 * rng.lognormvariate(0, 0.6))))
        samples.append(SampleMeta(row, offset + text, text // 2, tuple(items)))
    return tuple(samples)


def make_cases(stages: int, replicas: int, seconds: float, seed: int):
    """Cases off and auto; as many giants as a replica has windows, so that every window has one."""
    from omni_ds.emulate.world import Case

    plans = {mode: make_plan(stages, replicas, mode) for mode in ("off", "auto")}
    giants, steps = 0, {}
    while not steps or giants < max(len(step.replicas[0].members) for step in steps.values()):
        giants += 1
        samples = make_samples(plans["off"], giants, seed)
        steps = {mode: build_step(plan, 0, samples) for mode, plan in plans.items()}
    length = Case(plans["off"], steps["off"], 10**12).simulate().length
    scale = int(seconds * 1e9 * 10**12 / length)
    return giants, {mode: Case(plans[mode], steps[mode], scale) for mode in plans}


def gang_of(step) -> int:
    return max(i.gang for r in step.replicas for mb in r.micro_batches for s in mb.samples for i in s.items)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="simulated length of the steps without")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case, in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the samples")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    from omni_ds.engine.environment import prepare_imports

    prepare_imports()
    import torch

    from omni_ds.emulate.world import emulate

    header = ("long_short", "giants", "windows", "gang", "encoder", "simulated s", "measured s", "over off")
    print(f"{'mesh':>10} " + " ".join(f"{name:>12}" for name in header))
    rows = []
    for stages, replicas in MESHES:
        giants, cases = make_cases(stages, replicas, args.seconds, args.seed)
        measured = emulate(cases, args.repeats, timeout=60 + 8 * args.repeats * args.seconds)
        without = None
        for mode, runs in measured.items():
            step, simulated = cases[mode].step, cases[mode].simulate().length / 1e9
            median = statistics.median(run.nanoseconds / 1e9 for run in runs)
            without = without or median
            row = {
                "mesh": f"pp{stages} dp{replicas}",
                "long_short": mode,
                "giants": giants,
                "windows": len(step.replicas[0].members),
                "gang": gang_of(step),
                "encoder_imbalance": step.encoder_imbalance,
                "simulated_seconds": simulated,
                "measured_seconds": median,
                "over_off": median / without,
            }
            rows.append(row)
            cells = [f"{x:>12.3f}" if isinstance(x, float) else f"{x:>12}" for x in list(row.values())[1:]]
            print(f"{row['mesh']:>10} " + " ".join(cells))
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, {args.repeats} runs each in turn"
    )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
