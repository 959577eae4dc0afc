"""Real training with encoders on all ranks, against encoders on the first stage, on a mix that shifts.

Two pipeline stages on two CPU processes, one core and one thread each; encoder and LLM do the same work on
average, but steps are image-heavy, mixed or text-only in turn. Inputs are made beforehand, so that loading
takes no time; everything else is what a training step does.

    python benchmarks/placement.py [--rounds 4] [--json PATH] [--trace DIR]

Variants: colocated; first_stage_even (LLM cut evenly); first_stage_balanced (LLM cut so that the stages are
even for the average step, encoders counted). All three live in the same processes and take every step one
after another, in changing order, so that a busy machine slows all of them. A round is one step of each mix.
The losses must agree within 1e-4: placement changes the speed alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from anywhere, without an install

from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.sample import Item, SampleMeta

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
IMAGE, BATCH = 128, 16
VARIANTS = {
    "colocated": {"placement": "colocated"},
    "first_stage_even": {"placement": "first_stage"},
    "first_stage_balanced": {"placement": "first_stage", "first_stage_cut": "with_encoders"},
}
MIXES = {"image-heavy": 1.0, "mixed": 0.5, "text-only": 0.0}  # share of the samples with images
IMAGES = 5  # of a sample with images
TEXT = {True: (20, 60), False: (80, 160)}  # tokens of a sample with and without images


def config_of(folder: Path, hidden: int, layers: int, parallel: dict):
    from omni_ds.config.load import load_config
    from omni_ds.config.resolve import resolve

    llm = {
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 64,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "image_size": IMAGE,
        "patch_size": 16,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
    }
    raw = {
        "train_batch_size": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "eps": 1e-6}},
        "zero_optimization": {"stage": 1},
        "pipeline": {"stages": RANKS},
        "omni": {
            "llm": {"config": llm, "tokenizer": str(ROOT / "data/digits/tokenizer")},
            "encoders": {
                "vision": {
                    "config": vision,
                    "modality": "image",
                    "projector": {"reduction": "pixel_shuffle", "factor": 2},
                }
            },
            "encoder_parallel": parallel,
            "data": {"train": "unused.jsonl", "max_length": 512, "max_tokens_per_micro_batch": 512},
            "train": {"max_steps": 1000},
            "output_dir": str(folder),
        },
    }
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    return resolve(load_config(str(path)), RANKS, None, has_cuda=False)


def make_samples(meta: EncoderMeta, mix: str, seed: int) -> tuple[SampleMeta, ...]:
    rng, samples = random.Random(f"{mix}-{seed}"), []
    for i in range(BATCH):
        row, items, offset = BATCH * seed + i, [], 1
        media = i < MIXES[mix] * BATCH
        for ordinal in range(IMAGES if media else 0):
            segments, rows = meta.measure((IMAGE, IMAGE))
            items.append(Item(row, ordinal, meta.name, (IMAGE, IMAGE), segments, rows, ((offset, rows),)))
            offset += rows + 1
        text = rng.randint(*TEXT[media])
        samples.append(SampleMeta(row, offset + text, text // 2, tuple(items)))
    return tuple(samples)


def step_input(plan, step, rank: int):
    """Random tokens, targets and pixels, the same for a sample wherever it goes."""
    import torch

    from omni_ds.engine.step import StepInput

    def generator(*key: int) -> torch.Generator:
        return torch.Generator().manual_seed(hash(key) % 2**31)

    replica = step.replica_of(rank)
    batches = {mb.index: _packed(mb, generator, plan.llm.vocab) for mb in replica.micro_batches}
    media = {}
    for window in replica.windows:
        items = [placed.item for placed in window.share(rank).items]
        pixels = [torch.randn((3, IMAGE, IMAGE), generator=generator(i.row, i.ordinal)) for i in items]
        if pixels:
            media[window.index] = {"vision": pixels}
    return StepInput(step, batches, media, step.target_tokens, step.tokens)


def _packed(batch, generator, vocab: int):
    import torch

    from models.packed import PackedBatch

    ids, targets, places, of, features = [], [], [], [], []
    for n, (sample, start) in enumerate(zip(batch.samples, batch.cu_seqlens, strict=False)):
        tokens = torch.randint(vocab, (sample.tokens + 1,), generator=generator(sample.row))
        ids.append(tokens[:-1])
        first = sample.tokens - sample.target_tokens
        targets.append(tokens[1 + first :])
        places.append(torch.arange(start + first, start + sample.tokens))
        of.append(torch.full((sample.target_tokens,), n))
        features += [start + at + i for item in sample.items for at, rows in item.spans for i in range(rows)]

    def cat(parts):
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    return PackedBatch(
        input_ids=cat(ids),
        position_ids=cat([torch.arange(n) for n in batch.lengths]),
        cu_seqlens=torch.tensor(batch.cu_seqlens, dtype=torch.int32),
        max_seqlen=batch.max_seqlen,
        segments=batch.lengths,
        target_positions=cat(places),
        target_ids=cat(targets),
        sample_of_target=cat(of),
        feature_positions=torch.tensor(features, dtype=torch.int64) if features else None,
    )


def train(folder: str, hidden: int, layers: int, rounds: int) -> dict:
    """On every rank: {variant: {"stages", "steps": [(round, mix, tokens, seconds, loss)]}}."""
    import torch
    import torch.distributed as dist

    from omni_ds.composition import plan_of, read_composition
    from omni_ds.engine import environment
    from omni_ds.engine.runtime import build_runtime
    from omni_ds.parallel.groups import ProcessGroups
    from omni_ds.plan.build import build_step
    from omni_ds.plan.mesh import Mesh

    rank, device = dist.get_rank(), torch.device("cpu")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    groups = ProcessGroups.create(Mesh(RANKS, 1), environment.TIMEOUT)
    runtimes, results = {}, {}
    for name, parallel in VARIANTS.items():
        config = config_of(Path(folder), hidden, layers, parallel) if rank == 0 else None
        box = [config]
        dist.broadcast_object_list(box, src=0, group=groups.control)
        composition = read_composition(box[0], processors=False)
        (meta,) = composition.encoders
        average = [s for mix in MIXES for s in make_samples(meta, mix, 0)]
        plan = plan_of(box[0], composition, RANKS, average)
        runtimes[name] = build_runtime(box[0], composition, plan, groups, rank, device)
        results[name] = {"stages": [stop - start for start, stop in plan.stages], "steps": []}
    names = list(VARIANTS)
    for number in range(-1, rounds):  # the first round warms up
        for turn, mix in enumerate(MIXES):
            samples = make_samples(meta, mix, number + 1)
            shift = (number + turn) % len(names)
            for name in names[shift:] + names[:shift]:
                runtime = runtimes[name]
                step = build_step(runtime.plan, number + 1, samples)
                inputs = step_input(runtime.plan, step, rank)
                dist.barrier(group=groups.control)
                started = time.perf_counter()
                result = runtime.executor.run(inputs)
                dist.barrier(group=groups.control)
                seconds = time.perf_counter() - started
                results[name]["steps"].append((number, mix, step.tokens, seconds, result.loss))
    for name, runtime in runtimes.items():  # one more step, for the picture
        step = build_step(runtime.plan, rounds + 1, make_samples(meta, "image-heavy", rounds + 1))
        inputs = replace(step_input(runtime.plan, step, rank), measure=True)
        dist.barrier(group=groups.control)
        results[name]["trace"] = (runtime.plan, step, runtime.executor.run(inputs).times)
    results["encoder_ratio"] = _ratio(plan, average)
    return results


def _ratio(plan, samples) -> float:
    encoders = {meta.name: meta for meta in plan.encoders}
    encode = sum(encoders[i.encoder].item_cost(i) for s in samples for i in s.items)
    return encode / sum(3 * plan.llm.sample_flops(s.tokens, s.target_tokens) for s in samples)


def per_round(steps) -> list[float]:
    """Tokens per second of each measured round."""
    rounds = sorted({number for number, *_ in steps if number >= 0})
    return [
        sum(tokens for n, _, tokens, _, _ in steps if n == number)
        / sum(seconds for n, _, _, seconds, _ in steps if n == number)
        for number in rounds
    ]


def report(results: dict, hidden: int, layers: int) -> list[dict]:
    """Print and return the rows; AssertionError when losses differ."""
    import torch

    print(f"hidden {hidden}, {layers} + {layers} layers, encoder:LLM {results.pop('encoder_ratio'):.2f}")
    rate = {name: per_round(result["steps"]) for name, result in results.items()}
    ours, rows = results["colocated"]["steps"], []
    print(f"{'variant':>21} {'layers':>7} {'tokens/s':>9} {'from - to':>15} {'colocated is faster by':>23}")
    for name, result in results.items():
        for mine, theirs in zip(ours, result["steps"], strict=True):
            assert abs(mine[4] - theirs[4]) <= 1e-4 * abs(mine[4]), (name, mine, theirs)
        gains = sorted(a / b for a, b in zip(rate["colocated"], rate[name], strict=True))
        pairs = [pair for pair in zip(result["steps"], ours, strict=True) if pair[0][0] >= 0]
        by_mix = {m: statistics.median(a[3] / b[3] for a, b in pairs if a[1] == m) for m in MIXES}
        rows.append(
            {
                "variant": name,
                "layers": result["stages"],
                "tokens_per_second": statistics.median(rate[name]),
                "tokens_per_second_rounds": rate[name],
                "colocated_speedup": statistics.median(gains),
                "colocated_speedup_rounds": gains,
                "colocated_speedup_by_mix": by_mix,
                "losses": [step[4] for step in result["steps"]],
            }
        )
        print(
            f"{name:>21} {'+'.join(map(str, result['stages'])):>7} {statistics.median(rate[name]):>9.1f} "
            f"{min(rate[name]):>7.1f} {max(rate[name]):>7.1f} {statistics.median(gains):>8.3f} "
            f"({gains[0]:.3f} - {gains[-1]:.3f})  " + ", ".join(f"{m} {g:.2f}" for m, g in by_mix.items())
        )
    print(
        f"losses agree within 1e-4 over {len(ours)} steps; {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="measured rounds, one step of each mix")
    parser.add_argument("--hidden", type=int, default=256, help="of encoder and LLM; a multiple of 128")
    parser.add_argument("--layers", type=int, default=8, help="of encoder and LLM, each")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="draw an image-heavy step of each variant")
    args = parser.parse_args()
    from omni_ds.engine.environment import prepare_imports

    prepare_imports()
    import omni_ds.engine.runtime  # noqa: F401  once, in the parent
    from omni_ds.emulate.fork import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(
            train, RANKS, folder, args.hidden, args.layers, args.rounds, timeout=120 + 240 * args.rounds
        )
    rows = report(results[0], args.hidden, args.layers)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.trace:
        from omni_ds.show.trace_picture import draw_trace

        args.trace.mkdir(parents=True, exist_ok=True)
        for name in VARIANTS:
            plan, step, _ = results[0][name]["trace"]
            times = [result[name]["trace"][2] for result in results]
            draw_trace(plan, step, times, args.trace / f"{name}.png", step.step)


if __name__ == "__main__":
    main()
