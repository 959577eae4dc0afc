"""How fast one GPU trains: our engine on packed, varying samples, and where the time goes.

    python benchmarks/single_gpu.py [--model composed,moe,frozen] [--budget 8192,16384] [--steps N]
        [--recompute encoders] [--loop] [--profile] [--json PATH]
    python benchmarks/single_gpu.py --model qwen [--stock stock,padded,packed] [...]
    python benchmarks/single_gpu.py --model qwen --longest --budget 32768 --recompute all [...]

Samples are drawn from seeds: text log-normal(5.5, 0.8) tokens between 32 and 2048, most with one image of
varying size or one recording of up to 30 s; weights are fresh, media are noise that is already on the device:
what is measured is the step (plan made before), not decoding. MFU is the FLOPs of the model (forward and
backward, no recomputation, attention inside documents and segments only; omni_ds/plan/llm_meta.py and
encoder_meta.py) divided by the time, over the rate of a large bf16 matrix product measured first.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from anywhere, without an install

import torch

from benchmarks.parts import device_time
from benchmarks.parts.single_gpu_models import SAMPLES, configuration, qwen_folder
from omni_ds.engine import environment
from omni_ds.errors import UserError

LONGEST = 32768  # text tokens of the longest single sample


def draw_samples(plan, seed: int = 0, qwen: bool = False, tiny: bool = False):
    """SampleMeta of one global batch. tiny: with images of Qwen's that a CPU can encode."""
    from omni_ds.plan.sample import Item, SampleMeta

    rng, metas = random.Random(seed), {meta.modality: meta for meta in plan.encoders}
    samples = []
    for row in range(SAMPLES):
        text = int(min(2048, max(32, rng.lognormvariate(5.5, 0.8))))
        kind, items, rows = rng.random(), (), 0
        if kind < 0.7 and "image" in metas:
            meta, side = metas["image"], metas["image"].patch * metas["image"].factor
            least, most, middle = (64, 4096, 6.3) if qwen else (9, 1024, 4.9)
            if qwen and tiny:
                least, most, middle = 4, 64, 3.0
            blocks = min(most, max(least, rng.lognormvariate(middle, 0.9)))
            high = max(1, round(math.sqrt(blocks) * rng.uniform(0.7, 1.4)))
            shape = (high * side, max(1, int(blocks / high)) * side)
        elif kind < 0.9 and "audio" in metas:
            meta, shape = metas["audio"], (int(min(3000, max(100, rng.lognormvariate(6.8, 0.7)))),)
        else:
            meta = None
        if meta is not None:
            segments, rows = meta.measure(shape)
            items = (Item(row, 0, meta.name, shape, segments, rows, ((8, rows),)),)
        samples.append(SampleMeta(row, text + rows, text - 1 if qwen else text // 2, items))
    return samples


def longest_samples(plan):
    """A sample with an image of 16,384 patches, and one of 32,768 text tokens."""
    from omni_ds.plan.sample import Item, SampleMeta

    (meta,) = plan.encoders
    shape = (128 * meta.patch, 128 * meta.patch)
    segments, rows = meta.measure(shape)
    image = Item(0, 0, meta.name, shape, segments, rows, ((8, rows),))
    return [SampleMeta(0, 64 + rows, 63, (image,)), SampleMeta(1, LONGEST, LONGEST - 1, ())]


def build(model: str, budget: int, options: argparse.Namespace):
    """Runtime, plan and step input of one configuration."""
    from benchmarks.parts.workloads import drawn_on_device, step_input
    from omni_ds.composition import complete, mesh_of, plan_of, read_composition
    from omni_ds.config.load import load_config
    from omni_ds.config.resolve import resolve
    from omni_ds.engine.pipeline_module import stage_device
    from omni_ds.engine.runtime import build_runtime
    from omni_ds.parallel.groups import ProcessGroups
    from omni_ds.plan.build import build_step

    path = Path(tempfile.mkdtemp()) / "config.json"
    path.write_text(json.dumps(configuration(model, budget, options)))
    config = resolve(complete(load_config(path, ())), 1, None, has_cuda=torch.cuda.is_available())
    composition = read_composition(config, processors=False)
    plan, device = plan_of(config, composition, 1), stage_device(0)
    groups = ProcessGroups.create(mesh_of(config, 1), environment.TIMEOUT)
    with drawn_on_device(device):
        runtime = build_runtime(config, composition, plan, groups, 0, device)
    qwen = model == "qwen"
    samples = longest_samples(plan) if options.longest else draw_samples(plan, qwen=qwen, tiny=options.tiny)
    kinds = 3 if qwen else 1
    step = step_input(plan, build_step(plan, 0, samples), samples, 0, device, position_kinds=kinds)
    return runtime, plan, samples, step


def measure(model: str, budget: int, options: argparse.Namespace, ceiling: float) -> tuple[dict, list]:
    """A row of the table, and the samples."""
    from benchmarks.parts.release import release
    from benchmarks.parts.workloads import model_flops, now

    runtime, plan, samples, step = build(model, budget, options)
    device = runtime.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for _ in range(options.warm_up + options.steps):
        start = now(device)
        losses.append(runtime.executor.run(step).loss)
        seconds.append(now(device) - start)
    timed = seconds[options.warm_up :]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    profile = []
    if options.profile:
        profile = device_time.profile(lambda: runtime.executor.run(step), lambda: now(device))
    by_hand = loop_seconds(runtime, step, options) if options.loop else None
    middle = statistics.median(timed)
    tokens = step.plan.tokens
    release(runtime)
    row = {
        "model": model,
        "budget": budget,
        "recompute": options.recompute,
        "micro_batches": step.plan.micro_batches,
        "tokens": tokens,
        "seconds": middle,
        "spread": (max(timed) - min(timed)) / middle,
        "tokens_per_second": tokens / middle,
        "mfu": model_flops(plan, samples) / middle / ceiling,
        "peak_gib": peak,
        "over_loop": None if by_hand is None else middle / by_hand,
        "profile": profile,
        "losses": losses,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    return row, samples


def loop_seconds(runtime, step, options: argparse.Namespace) -> float:
    """Seconds a step of the loop by hand, median."""
    from benchmarks.parts.hand_loop import HandLoop
    from benchmarks.parts.workloads import now

    loop, seconds = HandLoop(runtime, step), []
    for _ in range(options.warm_up + options.steps):
        start = now(runtime.device)
        loop.run(step)
        seconds.append(now(runtime.device) - start)
    return statistics.median(seconds[options.warm_up :])


def measure_stock(variant: str, budget: int, samples, options: argparse.Namespace) -> dict:
    """Hugging Face's class on the same samples (benchmarks/parts/stock.py)."""
    from benchmarks.parts.stock import StockModel
    from benchmarks.parts.workloads import now
    from omni_ds.engine.pipeline_module import stage_device

    device = stage_device(0)
    torch.cuda.reset_peak_memory_stats()
    model, seconds = StockModel(variant, qwen_folder(options), device, budget), []
    for _ in range(1 + options.stock_steps):  # the first one warms up
        start = now(device)
        loss = model.run(samples)
        seconds.append(now(device) - start)
    middle = statistics.median(seconds[1:])
    return {
        "model": f"HF, {variant}",
        "budget": budget,
        "seconds": middle,
        "tokens_per_second": sum(sample.tokens for sample in samples) / middle,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "last_loss": loss,
    }


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """One message and an end where options name what there is not, or do not go together."""
    from models.attention import BACKENDS

    for name, known in (
        ("model", ("composed", "moe", "frozen", "qwen")),
        ("stock", ("stock", "padded", "packed")),
        ("attention", [backend.name for backend in BACKENDS]),
    ):
        value = getattr(options, name)
        unknown = set((value or "").split(",")) - set(known)
        if unknown and (value or name == "model"):  # the other two may be left out
            names = ", ".join(repr(name) for name in sorted(unknown))
            parser.error(f"--{name}: there is no {names}; there are {', '.join(known)}")
    if (options.stock or options.longest) and options.model != "qwen":
        parser.error("--stock and --longest go with --model qwen alone")
    if options.stock and not torch.cuda.is_available():
        parser.error("--stock needs a GPU")
    if options.layers and "qwen" in options.model.split(","):
        parser.error("--layers is for composed models, not for qwen")
    least = LONGEST if options.longest else 2048 if options.model == "qwen" else 4096
    if min(options.budget) < least:
        parser.error(f"--budget: a sample of these may have {least} tokens; give at least as many")
    if options.json and not Path(options.json).absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {Path(options.json).absolute().parent}")


def count(text: str) -> int:
    """An option's number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def counts(text: str) -> list[int]:
    """Several with commas."""
    return [count(part) for part in text.split(",")]


def clear() -> None:
    """Give back the memory of a model that is gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="composed", help="composed, moe, frozen, qwen; several with commas"
    )
    parser.add_argument(
        "--budget", type=counts, default=[16384], help="tokens of a micro-batch; several with commas"
    )
    parser.add_argument("--steps", type=count, default=5)
    parser.add_argument("--warm_up", type=count, default=3)
    parser.add_argument("--recompute", choices=("none", "encoders", "all"), default="none")
    parser.add_argument(
        "--stock", default="", help="with qwen on a GPU: also HF's class; stock, padded, packed"
    )
    parser.add_argument("--stock_steps", type=count, default=2, help="timed ones of each")
    parser.add_argument(
        "--longest", action="store_true", help="with qwen: the longest single samples instead"
    )
    parser.add_argument("--attention", help="only these back ends (models/attention.py), with commas")
    parser.add_argument("--layers", type=int, default=0, help="of each part of a composed model, at most")
    parser.add_argument("--profile", action="store_true", help="also where the GPU's time goes")
    parser.add_argument("--loop", action="store_true", help="also the same modules in a loop by hand")
    parser.add_argument("--tiny", action="store_true", help="a small model in fp32, to try the script")
    parser.add_argument("--json", metavar="PATH")
    options = parser.parse_args()
    check(parser, options)
    environment.start_distributed()
    from benchmarks.parts.workloads import matmul_rate
    from models import attention
    from omni_ds.engine.pipeline_module import stage_device

    if options.attention:
        names = options.attention.split(",")
        attention.BACKENDS = tuple(b for b in attention.BACKENDS if b.name in names)
    ceiling = matmul_rate(stage_device(0))
    print(f"torch {torch.__version__}; a large bf16 matrix product runs at {ceiling / 1e12:.3g} TFLOP/s")
    rows = []
    for model in options.model.split(","):
        for budget in options.budget:
            row, samples = measure(model, budget, options, ceiling)
            rows.append(row)
            print(
                f"{model:10}{budget:>7} tokens {row['micro_batches']:>3} micro-batches"
                f"{row['seconds']:>9.3f} s (spread {row['spread']:.0%})"
                f"{row['tokens_per_second']:>9.0f} tok/s"
                f"{row['mfu']:>8.1%} of it{row['peak_gib']:>8.1f} GiB   loss {row['first_loss']:.4f} -> "
                f"{row['last_loss']:.4f}"
                + ("" if row["over_loop"] is None else f"   {row['over_loop']:.3f} x the loop by hand"),
                flush=True,
            )
            if row["profile"]:
                print(device_time.table(row["profile"]), flush=True)
            elif options.profile:
                print("no kernels on a GPU, so no profile", flush=True)
            clear()
            for variant in filter(None, options.stock.split(",")):
                try:
                    row = measure_stock(variant, budget, samples, options)
                except torch.OutOfMemoryError:
                    print(f"HF, {variant}: out of memory", flush=True)
                else:
                    rows.append(row)
                    print(
                        f"{row['model']:16}{row['seconds']:>9.3f} s{row['tokens_per_second']:>9.0f} tok/s"
                        f"{row['peak_gib']:>8.1f} GiB   loss {row['last_loss']:.4f}",
                        flush=True,
                    )
                clear()
    environment.stop_distributed()
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
