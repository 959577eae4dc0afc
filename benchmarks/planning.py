"""How long it takes to plan a step: samples to micro-batches, windows, shares, schedule, one rank's actions.

    python benchmarks/planning.py [--repeats N] [--json PATH]

Steps are planned in loader processes ahead of time; training waits for a plan only when planning takes
longer than a step (metric plan_wait_seconds). Every repeat plans another global batch of the same mix.
`first` is the first step of a kind, which also searches window sizes; later steps of a like mix remember the
search.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from anywhere, without an install

from benchmarks.parts.shapes import QWEN3_8B, SIGLIP_SO400M
from omni_ds.plan.build import PlanOptions, build_plan, build_step
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.example import example_samples
from omni_ds.plan.llm_meta import LLMMeta
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.sample import SampleMeta

# name: stages, replicas, micro-batches, samples (three of four have one medium)
CASES = {
    "8 stages, 64 micro-batches, 64 ranks": (8, 8, 64, 683),
    "8 stages, 64 micro-batches, 512 ranks": (8, 64, 64, 5461),
    "8 stages, 64 micro-batches, 8 ranks": (8, 1, 64, 85),
}
BUDGET = 8192


def plan_of(stages: int, replicas: int, micro_batches: int):
    from types import SimpleNamespace

    from omni_ds.config import ProcessorConfig, ProjectorConfig

    llm = LLMMeta.from_config(QWEN3_8B)
    section = SimpleNamespace(
        modality="image",
        freeze=False,
        feature_layer=None,
        feature_select=None,
        processor=ProcessorConfig(),
        projector=ProjectorConfig(reduction="pixel_shuffle", factor=3),
    )
    vision = EncoderMeta.from_config("vision", section, SIGLIP_SO400M, llm.hidden)
    options = PlanOptions(max_tokens_per_micro_batch=BUDGET, micro_batches=micro_batches)
    return build_plan(llm, (vision,), Mesh(stages, replicas), options)


def numbered(samples: tuple[SampleMeta, ...]) -> tuple[SampleMeta, ...]:
    return tuple(replace(sample, row=row) for row, sample in enumerate(samples))


def measure(stages: int, replicas: int, micro_batches: int, count: int, repeats: int) -> dict:
    plan = plan_of(stages, replicas, micro_batches)
    seconds = []
    for step in range(repeats + 1):
        samples = numbered(example_samples(plan, count, 2048, seed=step))
        start = time.perf_counter()
        planned = build_step(plan, step, samples)
        planned.actions(0)
        seconds.append(time.perf_counter() - start)
    later = seconds[1:]
    return {
        "stages": stages,
        "ranks": stages * replicas,
        "micro_batches": micro_batches,
        "media": sum(len(sample.items) for sample in samples),
        "first_ms": 1e3 * seconds[0],
        "median_ms": 1e3 * statistics.median(later),
        "min_ms": 1e3 * min(later),
        "max_ms": 1e3 * max(later),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", metavar="PATH")
    arguments = parser.parse_args()
    rows = []
    print(f"{'':40}{'media':>7}{'first':>9}{'median':>9}{'min':>9}{'max':>9}   ms")
    for name, (stages, replicas, micro_batches, count) in CASES.items():
        row = measure(stages, replicas, micro_batches, count, arguments.repeats)
        rows.append({"case": name, **row})
        print(
            f"{name:40}{row['media']:>7}{row['first_ms']:>9.1f}{row['median_ms']:>9.1f}"
            f"{row['min_ms']:>9.1f}{row['max_ms']:>9.1f}"
        )
    print(f"Python {platform.python_version()}, {platform.machine()}, one process")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
