"""Models, layouts and variants of benchmarks/multi_gpu.py, and a rank's engines for one of them."""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from benchmarks.parts.shapes import WHISPER_LARGE
from benchmarks.parts.workloads import drawn_on_device
from omni_ds.composition import plan_of, read_composition
from omni_ds.config import Config
from omni_ds.config.load import load_config
from omni_ds.config.resolve import resolve
from omni_ds.emulate.policies import encoders_first
from omni_ds.engine.plain_engine import PlainEngine
from omni_ds.engine.runtime import Runtime, build_runtime
from omni_ds.parallel.groups import ProcessGroups
from omni_ds.plan.build import Plan, StepPlan
from omni_ds.plan.sample import SampleMeta

LLM = {  # 3.1 billion parameters
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
VISION = {  # 0.66 billion with its projector
    "model_type": "siglip_vision_model",
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "image_size": 392,
    "patch_size": 14,
}
TINY_LLM = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 512}
TINY_LLM |= {"num_attention_heads": 4, "num_key_value_heads": 2}
TINY_VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY_VISION |= {"image_size": 56}
TINY_AUDIO = {"d_model": 32, "encoder_ffn_dim": 64, "encoder_layers": 2, "encoder_attention_heads": 2}
TINY_AUDIO |= {"max_source_positions": 100}
MODELS = {"vision": ("vision",), "composed": ("vision", "audio")}


class Layout(NamedTuple):
    """Degrees; what is left of the world is data-parallel."""

    pipe: int
    tensor: int = 1
    sequence: int = 1


LAYOUTS = {
    "pp2": Layout(2),
    "pp4": Layout(4),
    "pp2tp2": Layout(2, tensor=2),
    "pp2sp2": Layout(2, sequence=2),
    "pp4tp2": Layout(4, tensor=2),
    "dp": Layout(1),
}


def layouts_of(world: int) -> list[str]:
    """Layouts that divide a world."""
    return [name for name, (p, t, s) in LAYOUTS.items() if world % (p * t * s) == 0]


@dataclass(frozen=True)
class Variant:
    """One way to train the same step.

    encoder_parallel, balance: keys of these sections of `omni`. zero: stage of the LLM. stages: "many": only
    with a pipeline, "one": only without. options: of the plan, beside the configuration. policy: reorders a
    planned step. retimed: placed by measured times where there is a pipeline, as in training.
    """

    encoder_parallel: Mapping[str, Any] = field(default_factory=dict)
    balance: str = "auto"
    zero: int = 1
    stages: str = "any"
    options: Mapping[str, Any] = field(default_factory=dict)
    policy: Callable[[Plan, StepPlan], StepPlan] | None = None
    retimed: bool = True

    def fits(self, layout: Layout) -> bool:
        if self.stages == "any":
            return True
        return (layout.pipe > 1) == (self.stages == "many") and (self.stages == "many" or layout == Layout(1))


VARIANTS = {
    "ours": Variant(),
    "first_stage": Variant({"placement": "first_stage"}, stages="many"),
    "first_stage_cut": Variant(
        {"placement": "first_stage", "first_stage_cut": "with_encoders"}, stages="many"
    ),
    "encoders_first": Variant({"long_short": "off"}, policy=encoders_first, retimed=False),
    "zero1": Variant({"zero_stage": 1, "long_short": "off"}, balance="off", stages="one"),
    "zero3": Variant({"zero_stage": 3, "long_short": "off"}, balance="off", zero=3, stages="one"),
    "balance_off": Variant(balance="off"),
    "long_short_off": Variant({"long_short": "off"}),
    "filling_off": Variant(stages="many", options={"fill_bubbles": False}),
}


def configuration(
    model: str, layout: Layout, variant: Variant, samples: int, options: argparse.Namespace
) -> dict:
    """The JSON of a run. Learning rate 0: weights stay what they are, so that all steps of all variants have
    the same loss and gradient norm; the optimizer does all of its work."""
    tiny = options.tiny
    encoders = {
        "vision": {
            "config": VISION | (TINY_VISION if tiny else {}),
            "modality": "image",
            "projector": {"reduction": "pixel_shuffle", "factor": 2},
        },
        "audio": {
            "config": WHISPER_LARGE | (TINY_AUDIO if tiny else {}),
            "modality": "audio",
            "projector": {"reduction": "frame_stack", "factor": 4},
        },
    }
    return {
        "train_batch_size": max(1, samples),
        "gradient_clipping": 1.0,
        "bf16": {"enabled": not tiny},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": variant.zero},
        "pipeline": {"stages": layout.pipe, "activation_checkpoint_interval": int(options.recompute)},
        "tensor_parallel": {"autotp_size": layout.tensor},
        "sequence_parallel_size": layout.sequence,
        "omni": {
            "llm": {"config": LLM | (TINY_LLM if tiny else {}), "tokenizer": "none"},
            "encoders": {name: encoders[name] for name in MODELS[model]},
            "encoder_parallel": dict(variant.encoder_parallel),
            "balance": {"mode": variant.balance},
            "data": {
                "train": [{"path": "none"}],
                "max_length": options.budget,
                "max_tokens_per_micro_batch": options.budget,
            },
            "train": {"max_steps": 1},
            "output_dir": tempfile.gettempdir(),
        },
    }


@dataclass(frozen=True)
class Case:
    """A variant of a workload on a layout, planned but not built."""

    model: str
    layout: str
    variant: str
    workload: str
    config: Config
    composition: Any
    plan: Plan
    samples: tuple[SampleMeta, ...]

    @property
    def build_key(self) -> tuple:
        """Cases with the same one run in the same engines."""
        options, mesh = self.plan.options, self.plan.mesh
        return (
            self.model,
            mesh,
            options.placement,
            self.plan.stages,
            options.llm_zero_stage,
            options.encoder_zero_stage,
        )


def plan_case(
    model: str,
    layout: str,
    name: str,
    workload: str,
    samples: Sequence[SampleMeta],
    options: argparse.Namespace,
) -> Case:
    """The same on every rank."""
    variant, world = VARIANTS[name], dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(configuration(model, LAYOUTS[layout], variant, len(samples), options)))
        config = resolve(load_config(str(path), ()), world, None, has_cuda=torch.cuda.is_available())
    composition = read_composition(config, processors=False)
    plan = plan_of(config, composition, world, samples)
    plan = replace(plan, options=replace(plan.options, **variant.options))
    return Case(model, layout, name, workload, config, composition, plan, tuple(samples))


@contextmanager
def built(case: Case, groups: ProcessGroups, device: torch.device) -> Iterator[Runtime]:
    """The engines of a case, whose memory is released at the end.

    Process groups stay: torch derives the names of new ones from how many there are, and would reuse those of
    destroyed ones, with what these left in the store.
    """
    even_group_counts()
    with drawn_on_device(device):
        runtime = build_runtime(case.config, case.composition, case.plan, groups, dist.get_rank(), device)
    try:
        yield runtime
    finally:
        _release(runtime)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def even_group_counts() -> None:
    """Give every rank as many process groups as the others.

    torch names a group that only its members create by how many they have already. After engines of another
    layout that differs between ranks, and members would wait for each other under different names.
    """
    mine = len(dist.distributed_c10d._world.pg_names)
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, mine)
    for _ in range(max(counts) - mine):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def _release(runtime: Runtime) -> None:
    """Let go of all memory, although the caller's name still holds the runtime, and the hooks of ZeRO-3 their
    parameters and their optimizer."""
    plain = isinstance(runtime.llm, PlainEngine)
    for engine in (runtime.llm.engine if plain else runtime.llm, runtime.encoders.engine):
        if engine is None:
            continue
        engine.destroy()
        if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
            for parameter in engine.module.parameters():
                parameter.ds_tensor = None
                parameter.data = torch.empty(0, device=parameter.device)
            inner = engine.optimizer.optimizer
            inner.state.clear()
            inner.param_groups.clear()
            vars(engine.optimizer).clear()
    vars(runtime).clear()
