"""``--plan`` and ``--inspect``: what would run, without a process group."""

import argparse

from omni_ds.composition import plan_of, read_composition
from omni_ds.config.load import load_config
from omni_ds.config.resolve import resolve


def print_plan(arguments: argparse.Namespace) -> int:
    """Print mesh, placement, parameters and memory per rank, and one step; returns the exit status."""
    from omni_ds.plan.build import build_step
    from omni_ds.plan.example import example_samples
    from omni_ds.plan.render import format_plan

    config = load_config(arguments.deepspeed_config, arguments.set)
    stages = config.pipeline.stages
    world = arguments.world_size or (1 if stages == "auto" else stages)
    config = resolve(config, world, None)
    composition = read_composition(config, processors=False)
    plan = plan_of(config, composition, world)
    step = build_step(plan, 0, example_samples(plan, config.train_batch_size, config.omni.data.max_length))
    print(format_plan(plan, step))
    return 0


def inspect_samples(arguments: argparse.Namespace) -> int:
    """Print samples as the model sees them; returns the exit status."""
    from data.index import open_dataset
    from data.inspect import inspect_samples as inspect

    config = load_config(arguments.deepspeed_config, arguments.set)
    composition = read_composition(config)
    dataset = open_dataset(
        config.omni.data.train,
        config.omni.data,
        composition.text,
        composition.media,
        {meta.name: meta for meta in composition.encoders},
        builder=True,
    )
    print(inspect(dataset, arguments.inspect))
    return 0
