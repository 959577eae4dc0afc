"""Measured against simulated step times, with real processes, process groups and messages.

Every rank is a process that runs the real step executor over gloo; F, B, EF and EB sleep as long as their
modelled work takes, and what they exchange has the planned shapes in fp32. So many ranks fit on few cores,
and what is measured is what a simulation leaves out: messages, their order, and who waits for whom. Messages
are checked: a row in the wrong place stops the run.

    python benchmarks/emulate.py [--ranks 8] [--seconds 8] [--repeats 3] [--json PATH] [--trace DIR]

Layout: one replica, a rank a stage. Cases: colocated (what training runs), first_stage (encoders inline on
stage 0, layers cut evenly) and encoders_first (all encoding before the pipeline, all of its backward after).
Samples: text of log-normal length and up to four images; the printed encoder:LLM is the ratio of their work.
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

from omni_ds.config.parts import EncoderConfig
from omni_ds.plan.build import Plan, PlanOptions, build_plan, build_step
from omni_ds.plan.cost import EncoderCost
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.llm_meta import LLMMeta
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.sample import Item, SampleMeta

HIDDEN = 512
LLM = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": HIDDEN,
    "intermediate_size": 1536,
    "num_hidden_layers": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "image_size": 224,
    "patch_size": 16,
}
TOKENS = 768  # of a micro-batch, at most
SAMPLES = 6  # a rank, on average


def make_plan(ranks: int, placement: str) -> Plan:
    section = EncoderConfig(
        config=VISION, modality="image", projector={"reduction": "pixel_shuffle", "factor": 2}
    )
    vision = EncoderMeta.from_config("vision", section, VISION, HIDDEN)
    options = PlanOptions(
        placement=placement, max_tokens_per_micro_batch=TOKENS, micro_batches=2 * ranks if ranks > 1 else 4
    )
    return build_plan(LLMMeta.from_config(LLM), (vision,), Mesh(ranks, 1), options)


def make_samples(plan: Plan, count: int, seed: int) -> tuple[SampleMeta, ...]:
    rng, meta = random.Random(seed), plan.encoders[0]
    samples = []
    for row in range(count):
        text = max(16, min(200, int(60 * rng.lognormvariate(0, 0.6))))
        items, offset = [], 4
        for ordinal in range(rng.choice((0, 0, 1, 1, 2, 4))):
            shape = (32 * rng.randint(3, 7), 32 * rng.randint(3, 7))
            segments, rows = meta.measure(shape)
            items.append(Item(row, ordinal, meta.name, shape, segments, rows, ((offset, rows),)))
            offset += rows + 1
        samples.append(SampleMeta(row, offset + text, text // 2, tuple(items)))
    return tuple(samples)


def make_cases(ranks: int, seconds: float, seed: int):
    from omni_ds.emulate.policies import encoders_first
    from omni_ds.emulate.world import Case

    plan, inline = make_plan(ranks, "colocated"), make_plan(ranks, "first_stage")
    samples = make_samples(plan, SAMPLES * ranks, seed)
    step = build_step(plan, 0, samples)
    steps = {
        "colocated": (plan, step),
        "first_stage": (inline, build_step(inline, 0, samples)),
        "encoders_first": (plan, encoders_first(plan, step)),
    }
    length = Case(plan, step, 10**12).simulate().length
    scale = int(seconds * 1e9 * 10**12 / length)
    return {name: Case(*pair, scale) for name, pair in steps.items()}


def encoder_ratio(case) -> float:
    plan, cost = case.plan, EncoderCost(case.plan.encoders)
    samples = [s for replica in case.step.replicas for mb in replica.micro_batches for s in mb.samples]
    llm = 3 * sum(plan.llm.sample_flops(s.tokens, s.target_tokens) for s in samples)
    return sum(cost.total(item) for s in samples for item in s.items) / llm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=8.0, help="simulated length of the colocated step")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case, in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the samples")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="draw planned above measured for each case")
    args = parser.parse_args()
    from omni_ds.engine.environment import prepare_imports

    prepare_imports()
    import torch

    from omni_ds.emulate.world import emulate

    cases = make_cases(args.ranks, args.seconds, args.seed)
    simulated = {name: case.simulate() for name, case in cases.items()}
    ratio = encoder_ratio(cases["colocated"])
    limit = 60 + 3 * args.repeats * sum(s.length for s in simulated.values()) / 1e9
    measured = emulate(cases, args.repeats, timeout=limit)
    print(
        f"{args.ranks} stages, {cases['colocated'].step.micro_batches} micro-batches, encoder:LLM {ratio:.2f}"
    )
    print(
        f"{'case':>15} {'simulated s':>12} {'measured s':>11} {'from - to':>15} {'ratio':>6} {'MB sent':>8}"
    )
    rows = []
    for name, runs in measured.items():
        seconds = sorted(run.nanoseconds / 1e9 for run in runs)
        expected = simulated[name].length / 1e9
        median = statistics.median(seconds)
        rows.append(
            {
                "ranks": args.ranks,
                "case": name,
                "encoder_ratio": ratio,
                "simulated_seconds": expected,
                "measured_seconds": median,
                "measured_seconds_all": seconds,
                "measured_over_simulated": median / expected,
                "megabytes_sent": runs[0].bytes_sent / 1e6,
            }
        )
        print(
            f"{name:>15} {expected:>12.3f} {median:>11.3f} {seconds[0]:>7.3f} {seconds[-1]:>7.3f} "
            f"{median / expected:>6.3f} {runs[0].bytes_sent / 1e6:>8.0f}"
        )
    by_name = {row["case"]: row for row in rows}
    first, ours = by_name["first_stage"], by_name["colocated"]
    print(
        f"first_stage / colocated: simulated {first['simulated_seconds'] / ours['simulated_seconds']:.3f}, "
        f"measured {first['measured_seconds'] / ours['measured_seconds']:.3f}"
    )
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, {args.repeats} runs each in turn"
    )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.trace:
        _draw(cases, measured, args.trace)


def _draw(cases, measured, folder: Path) -> None:
    from omni_ds.show.trace_picture import draw_trace

    folder.mkdir(parents=True, exist_ok=True)
    for name, runs in measured.items():
        case = cases[name]
        draw_trace(case.plan, case.step, runs[0].times, folder / f"{name}.png", case.step.step)


if __name__ == "__main__":
    main()
