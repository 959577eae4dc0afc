"""Peak memory of a rank under each layout, measured against the plan's prediction; and memory while loading.

    python benchmarks/memory.py [--only pp,tp,...] [--steps N] [--bf16] [--no-load] [--json PATH]

A Qwen3 of 28 million parameters (for experts a Qwen3-MoE of 25 million), text of the bundled digits, AdamW;
forked ranks train a few steps. Measured is what tensors occupy: on a CPU every allocation and release that
torch's allocator reports to its profiler from before the model is built, summed; on a GPU
torch.cuda.max_memory_allocated. Both leave out memory that is reserved but unused, code and libraries, which
no layout changes. Resident set size would add the heap's unused pages and the pages that forked ranks share.

The reduce bucket is 2 million elements here: DeepSpeed's 500 million would be most of the memory of a model
this small on every rank of every layout.

Loading: a checkpoint of four safetensors files is read by pp2 x tp2 ranks; resident memory (file pages
included) is taken before and, at its peak, while the LLM's weights are read, and compared with the bytes of
the rank's parameters.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from anywhere, without an install

import torch

from omni_ds.emulate.fork import RankFailure, run_ranks
from omni_ds.engine.environment import prepare_imports

ROOT = Path(__file__).resolve().parent.parent
DIGITS = ROOT / "data" / "digits"
VOCABULARY = 4096
MIB = 1 << 20
WITHIN = 0.15
LOADING = 1.3  # times a rank's share


@dataclass(frozen=True)
class Layout:
    """axis: the one that grows from row to row."""

    axis: str
    name: str
    world: int
    settings: tuple[str, ...] = ()
    experts: bool = False


def _layouts() -> tuple[Layout, ...]:
    found = [Layout("-", "one rank", 1)]
    for n in (2, 4):
        found += [
            Layout("pp", f"pp{n}", n, (f"pipeline.stages={n}",)),
            Layout("tp", f"tp{n}", n, (f"tensor_parallel.autotp_size={n}",)),
            Layout("sp", f"sp{n}", n, (f"sequence_parallel_size={n}",)),
        ]
        for zero in (1, 2, 3):
            name = f"dp{n} ZeRO-{zero}"
            found.append(Layout(f"dp{zero}", name, n, (f"zero_optimization.stage={zero}",)))
    found.append(Layout("-", "dp2 ZeRO-0", 2, ("zero_optimization.stage=0",)))
    found.append(Layout("-", "one rank recomputed", 1, ("pipeline.activation_checkpoint_interval=1",)))
    found.append(Layout("-", "pp2 tp2", 4, ("pipeline.stages=2", "tensor_parallel.autotp_size=2")))
    for n in (1, 2, 4):
        found.append(Layout("ep", f"dp4 ep{n}", 4, (f"expert_parallel.autoep_size={n}",), experts=True))
    order = {layout.axis: i for i, layout in reversed(list(enumerate(found)))}
    return tuple(sorted(found, key=lambda layout: order[layout.axis]))


def llm_config(experts: bool) -> dict:
    """HF config of the model that is trained."""
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "model_type": "qwen3",
    }
    if experts:
        sizes = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}
        config |= {"model_type": "qwen3_moe", "moe_intermediate_size": 352} | sizes
    return config


def training_config(folder: Path, part: dict, steps: int, bf16: bool) -> dict:
    """What run.py would be given, for the LLM `part`."""
    return {
        "train_batch_size": 128,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 1,
            "reduce_bucket_size": 2_000_000,
            "stage3_prefetch_bucket_size": 2_000_000,
            "stage3_param_persistence_threshold": 10_000,
        },
        "omni": {
            "llm": {**part, "tokenizer": str(DIGITS / "tokenizer")},
            "data": {
                "train": [{"path": str(DIGITS / "train_text.jsonl")}],
                "max_length": 256,
                "max_tokens_per_micro_batch": 256,
                "num_workers": 0,
                "cache_dir": str(folder / "cache"),
            },
            "train": {"max_steps": steps, "seed": 1},
            "output_dir": str(folder / "out"),
        },
    }


class Allocations:
    """Peak bytes of tensors while the context is open."""

    def __enter__(self) -> Allocations:
        self.peak = 0
        self._profiler = None
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            )
            self._profiler.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._profiler is None:
            self.peak = torch.cuda.max_memory_allocated()
            return
        self._profiler.__exit__(*error)
        events = self._profiler.profiler.kineto_results.events()
        held = 0
        for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
            held += size
            self.peak = max(self.peak, held)


def train_rank(path: str, settings: tuple[str, ...]) -> tuple[int, int, int]:
    """On every rank: (measured, predicted, parameters)."""
    from omni_ds.config.load import load_config
    from omni_ds.engine.launch import assemble
    from omni_ds.engine.step_input import prepare
    from omni_ds.layout import numerics_of
    from omni_ds.parallel.agreement import agree_on_step
    from omni_ds.plan.activations import Load
    from omni_ds.plan.memory import rank_memory

    predicted = 0
    with Allocations() as allocations:
        run = assemble(load_config(path, settings))
        runtime = run.runtime
        numerics = numerics_of(run.config, fused=runtime.device.type == "cuda")
        stage = run.plan.mesh.coords(runtime.rank).pipe
        for batch in run.batches(0, run.config.omni.train.max_steps):
            agree_on_step(batch.step_plan, [], runtime.groups.control)
            runtime.executor.run(prepare(batch, runtime.rank, (), runtime.device))
            memory = rank_memory(run.plan, stage, Load.of(batch.step_plan), numerics)
            predicted = max(predicted, memory.peak)
        del batch
    return allocations.peak, predicted, memory.parameters


def load_rank(path: str, settings: tuple[str, ...]) -> tuple[int, int]:
    """On every rank: (growth of resident memory while the LLM is read, bytes of its parameters)."""
    from omni_ds.config.load import load_config
    from omni_ds.engine import loading
    from omni_ds.engine.launch import assemble

    load, grown = loading.load_llm, []

    def watched(modules, *args, **kwargs):
        modules = list(modules)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _resident("VmRSS")
        result = load(modules, *args, **kwargs)
        grown.append(_resident("VmHWM") - before)
        return result

    loading.load_llm = watched
    run = assemble(load_config(path, settings))
    share = sum(held.parameter.numel() for held in run.runtime.module.held()) * 4
    return grown[0], share


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key))) * 1024


def save_checkpoint(folder: Path) -> None:
    """An untied Qwen3 in four files of fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = llm_config(experts=False)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config)
    size = sum(p.numel() for p in model.parameters()) * 4
    model.save_pretrained(folder, max_shard_size=f"{size // 3 // MIB}MB")


def measure(layout: Layout, folder: Path, steps: int, bf16: bool) -> dict:
    """One row; of the rank that needs most. A layout that fails has an `error`."""
    raw = training_config(folder, {"config": llm_config(layout.experts)}, steps, bf16)
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    row = {"layout": layout.name, "axis": layout.axis, "world": layout.world}
    try:
        results = run_ranks(train_rank, layout.world, str(path), layout.settings, timeout=600)
    except RankFailure as failure:
        return row | {"error": next((t for t in reversed(str(failure).splitlines()) if t.strip()), "")}
    measured, predicted, parameters = max(results)
    return row | {
        "parameters": parameters,
        "measured": measured,
        "predicted": predicted,
        "ratio": max((p / m for m, p, _ in results), key=lambda ratio: abs(ratio - 1)),
    }


def measure_loading(folder: Path) -> list[dict]:
    """One row a rank of pp2 x tp2."""
    save_checkpoint(folder / "llm")
    path = folder / "config.json"
    path.write_text(json.dumps(training_config(folder, {"path": str(folder / "llm")}, 1, False)))
    settings = ("pipeline.stages=2", "tensor_parallel.autotp_size=2")
    results = run_ranks(load_rank, 4, str(path), settings, timeout=600)
    return [{"rank": r, "grown": g, "share": s, "ratio": g / s} for r, (g, s) in enumerate(results)]


def show(row: dict) -> None:
    if "error" in row:
        print(f"{row['layout']:<24} {row['error'][:100]}", flush=True)
        return
    print(
        f"{row['layout']:<24} {row['parameters'] / 1e6:>7.2f}  {row['measured'] / MIB:>9.1f}  "
        f"{row['predicted'] / MIB:>9.1f}  {row['ratio']:>6.3f}"
        + ("" if abs(row["ratio"] - 1) <= WITHIN else "  off by more than 15 %"),
        flush=True,
    )


def check(rows: list[dict]) -> list[str]:
    """What is wrong: predictions off, and axes along which the peak does not fall."""
    good = [row for row in rows if "error" not in row]
    faults = [f"{row['layout']}: failed" for row in rows if "error" in row]
    faults += [
        f"{row['layout']}: predicted / measured {row['ratio']:.3f}"
        for row in good
        if abs(row["ratio"] - 1) > WITHIN
    ]
    first = [row for row in good if row["layout"] == "one rank"]
    for axis in dict.fromkeys(row["axis"] for row in good if row["axis"] != "-"):
        along = ([] if axis == "ep" else first) + [row for row in good if row["axis"] == axis]
        peaks = [row["measured"] for row in along]
        if peaks != sorted(peaks, reverse=True):
            faults.append(f"{axis}: the peak does not fall: {', '.join(f'{p / MIB:.0f}' for p in peaks)} MiB")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names or axes of layouts, separated by commas")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--no-load", action="store_true", help="leave the loading part out")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    prepare_imports()
    import deepspeed  # noqa: F401  heavy: once, before ranks are forked
    import transformers

    wanted = arguments.only.split(",") if arguments.only else None
    layouts = [x for x in _layouts() if wanted is None or {x.name, x.axis} & set(wanted)]
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, deepspeed {deepspeed.__version__}, {platform.machine()}, "
        f"{'cuda' if torch.cuda.is_available() else 'CPU'}, {'bf16' if arguments.bf16 else 'fp32'}; "
        "of the rank with most; ratio of the rank that is furthest off"
    )
    print(f"{'layout':<24} {'million':>7}  {'MiB':>9}  {'predicted':>9}  {'ratio':>6}")
    rows, loading = [], []
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        for layout in layouts:
            rows.append(measure(layout, Path(folder), arguments.steps, arguments.bf16))
            show(rows[-1])
        if not arguments.no_load and not torch.cuda.is_available():
            loading = measure_loading(Path(folder))
            for row in loading:
                print(
                    f"loading pp2 tp2, rank {row['rank']}: {row['grown'] / MIB:.1f} MiB resident for "
                    f"{row['share'] / MIB:.1f} MiB of parameters, {row['ratio']:.2f} times"
                )
    faults = check(rows)
    faults += [
        f"loading, rank {row['rank']}: {row['ratio']:.2f} times" for row in loading if row["ratio"] > LOADING
    ]
    print("\n".join(faults) if faults else "every prediction within 15 %, and every axis lowers the peak")
    if arguments.json:
        versions = {"torch": torch.__version__, "deepspeed": deepspeed.__version__}
        record = {
            "versions": versions,
            "rows": rows,
            "loading": loading,
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
