"""``--plan`` and ``--inspect``: what would run, without a process group."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from omni_ds.composition import complete, plan_of, read_composition
from omni_ds.config.load import load_config
from omni_ds.config.resolve import resolve
from omni_ds.errors import UserError

if TYPE_CHECKING:
    from omni_ds.plan.build import Plan, StepPlan


def print_plan(arguments: argparse.Namespace) -> int:
    """Print mesh, placement, parameters and memory per rank, and one step; returns the exit status.

    The same step and, beside it, those of other mixes of modalities are drawn into plan.png and written to
    plan.json, in ``--out`` or else in omni.output_dir.
    """
    from omni_ds.engine.environment import found_device
    from omni_ds.layout import numerics_of, on_gpu, settle_degrees
    from omni_ds.plan.build import build_step
    from omni_ds.plan.example import example_samples, mixes_of
    from omni_ds.plan.render import format_plan

    config = complete(load_config(arguments.deepspeed_config, arguments.set))
    stages = config.pipeline.stages
    world = arguments.world_size or (1 if stages == "auto" else stages)
    composition = read_composition(config, processors=False)
    device = found_device()
    config, choice = settle_degrees(config, world, device, composition)
    config = resolve(config, world, None, has_cuda=on_gpu(config, device))
    plan = plan_of(config, composition, world)
    if config.omni.encoder_parallel.first_stage_cut == "with_encoders":
        examples = example_samples(plan, config.train_batch_size, config.omni.data.max_length)
        plan = plan_of(config, composition, world, examples)
    steps = {
        mix: build_step(
            plan, 0, example_samples(plan, config.train_batch_size, config.omni.data.max_length, mix=mix)
        )
        for mix in mixes_of(plan)
    }
    if choice is not None:
        print(f"{choice}\n")
    print(format_plan(plan, steps["example"], numerics_of(config, fused=on_gpu(config, device))))
    _write_pictures(plan, steps, Path(arguments.out or config.omni.output_dir))
    return 0


def _write_pictures(plan: "Plan", steps: Mapping[str, "StepPlan"], folder: Path) -> None:
    from omni_ds.show.plan_picture import draw_plan
    from omni_ds.show.plan_record import Planned, write_plan

    planned = {mix: Planned.of(plan, step) for mix, step in steps.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_plan(plan, planned, folder / "plan.json")
        draw_plan(plan, planned, folder / "plan.png")
    except OSError as error:
        raise UserError(
            f"{folder}: cannot write plan.json and plan.png there ({error.strerror}); name another folder "
            "with --out"
        ) from None
    print(f"\nDrawn for {', '.join(steps)}: {folder / 'plan.png'}; as data: {folder / 'plan.json'}")


def inspect_samples(arguments: argparse.Namespace) -> int:
    """Print samples as the model sees them; returns the exit status."""
    from data.index import open_dataset
    from data.inspect import inspect_samples as inspect

    config = complete(load_config(arguments.deepspeed_config, arguments.set))
    composition = read_composition(config)
    dataset = open_dataset(
        config.omni.data.train,
        config.omni.data,
        composition.text,
        composition.media,
        {meta.name: meta for meta in composition.encoders},
        builder=True,
        rolling=True,
    )
    print(inspect(dataset, arguments.inspect))
    return 0
