"""The joint pipeline against what other systems do, measured on several GPUs, all in one run.

    deepspeed --num_accelerators 4 benchmarks/multi_gpu.py [--models vision,composed] [--layouts pp4,dp]
        [--variants ours,first_stage] [--workloads "image:text 3:7,image:text 9:1"] [--budget N]
        [--per_rank N] [--repeats 3] [--steps 3] [--recompute] [--json PATH] [--report DIR]
    python benchmarks/multi_gpu.py --cpu 2 --tiny        small models in fp32 on forked processes, to try it

Models: vision (0.7 billion parameters) + 3B LLM; composed: and Whisper-large's encoder. Weights are fresh,
media noise on the device, steps planned beforehand: what is measured is the step. Workloads:
parts/workloads.py; a global batch has as many tokens as fill 4 micro-batches a rank on average.

Variants, on every layout that they fit:

- ours: encoders on all ranks, all features on
- first_stage, first_stage_cut: encoders on the first stage, layers cut evenly, or evenly with the encoders'
  work of this workload counted
- encoders_first: all encoding before the pipeline, all of its backward after it
- zero1, zero3: layout dp alone: samples to ranks in order, media on the rank of their sample, ZeRO-1 or 3
- balance_off, long_short_off, filling_off: ours without one feature

Every repetition builds all variants anew (--resident: keeps those of the first), in another order, and takes
the median of its steps. Before the first one each case is measured once and a time model fitted, with which
the steps after it are planned, as in training. One more step is measured for the account of the time; its
actions wait for the device. The learning rate is 0, so that loss and gradient norm have to be equal in all
steps of a workload, which is checked. Cases that the plan predicts not to fit the GPU are left out, with a
message. Ranks have to be on one host: the account compares their clocks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from anywhere, without an install

from omni_ds.engine import environment


def run(options: argparse.Namespace) -> list[str]:
    """On every rank: all cases. Returns what was wrong, on rank 0."""
    import torch
    import torch.distributed as dist

    from benchmarks.parts import report, variants
    from benchmarks.parts.cases import Bench
    from benchmarks.parts.workloads import WORKLOADS, matmul_rate
    from omni_ds.engine.pipeline_module import stage_device

    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0 and options.terminal is not None:
        sys.stdout = os.fdopen(options.terminal, "w", buffering=1)
    device = stage_device(int(os.environ.get("LOCAL_RANK", "0")))
    rates: list = [None] * world
    dist.all_gather_object(rates, matmul_rate(device))
    bench = Bench(options, device, sum(rates))
    heading = (
        f"{world} x {_name(device)}, torch {torch.__version__}; a large bf16 matrix product runs at "
        f"{min(rates) / 1e12:.2f} to {max(rates) / 1e12:.2f} TFLOP/s; load {os.getloadavg()[0]:.1f}"
    )
    bench.say(heading)
    bench.plan(
        _chosen(options.models, list(variants.MODELS), "models"),
        _chosen(options.layouts, variants.layouts_of(world), "layouts"),
        _chosen(options.variants, list(variants.VARIANTS), "variants"),
        _chosen(options.workloads, list(WORKLOADS), "workloads"),
    )
    for repetition in range(options.repeats):
        bench.repeat(repetition)
        if rank == 0 and options.json:
            options.json.write_text(json.dumps(bench.rows(), indent=1) + "\n")  # whatever comes later
    if rank != 0:
        return []
    rows = bench.rows()
    faults = report.differences(rows, 1e-4 if options.tiny else 5e-3)
    text = report.text(rows, faults, heading, " ".join(sys.argv))
    print(text, flush=True)
    if options.report:
        options.report.mkdir(parents=True, exist_ok=True)
        (options.report / "report.md").write_text(text + "\n")
        report.draw(options.report, bench.entries)
    return faults


def _name(device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU of {os.cpu_count()} cores"


def _chosen(text: str | None, possible: list[str], what: str) -> list[str]:
    names = possible if text is None else text.split(",")
    unknown = [name for name in names if name not in possible]
    if unknown:
        raise SystemExit(f"--{what} {','.join(unknown)}: possible here: {', '.join(possible)}")
    return names


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help="vision, composed; several with commas; default all")
    parser.add_argument("--layouts", help="pp2, pp4, pp2tp2, pp2sp2, pp4tp2, dp; default all that N allows")
    parser.add_argument("--variants", help="default all")
    parser.add_argument("--workloads", help="default all that the model can have")
    parser.add_argument("--budget", type=int, help="tokens of a micro-batch; default 4096, tiny 256")
    parser.add_argument("--per_rank", type=int, default=4, help="micro-batches a rank, on average")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a case in a repetition")
    parser.add_argument("--seed", type=int, default=0, help="of the samples")
    parser.add_argument("--resident", action="store_true", help="build once; peak memory: of all engines")
    parser.add_argument("--recompute", action="store_true", help="activations of LLM and encoders")
    parser.add_argument("--tiny", action="store_true", help="small models in fp32")
    parser.add_argument("--cpu", type=int, metavar="N", help="fork N ranks on this machine's CPU")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write report.md, plan.png and trace.png")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # set by launchers
    parser.add_argument(
        "--limit", type=float, default=3600, help="seconds after which forked ranks are ended"
    )
    options = parser.parse_args(arguments)
    options.terminal = None
    options.budget = options.budget or (256 if options.tiny else 4096)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    environment.prepare_imports()
    import torch

    if options.cpu is None and "RANK" not in os.environ and not torch.cuda.is_available():
        options.cpu, options.tiny, options.budget = 2, True, options.budget if options.tiny else 256
    if options.cpu is None:
        environment.start_distributed()
        faults = run(options)
        environment.stop_distributed()
        return int(bool(faults))
    import omni_ds.engine.runtime  # noqa: F401  once, in the parent
    from omni_ds.emulate.fork import run_ranks

    options.terminal = os.dup(1)  # ranks write into files
    return int(any(run_ranks(run, options.cpu, options, timeout=options.limit)))


if __name__ == "__main__":
    sys.exit(main())
