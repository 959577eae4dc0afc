"""Parallel degrees that a configuration leaves "auto", and what of it decides the memory of a rank."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from omni_ds.composition import Composition, plan_options, read_composition
from omni_ds.config import Config
from omni_ds.config.resolve import DEGREES, asked_degrees, resolve, with_degrees
from omni_ds.plan.auto import Choice, Degrees, choose
from omni_ds.plan.build import build_plan
from omni_ds.plan.example import example_samples
from omni_ds.plan.hardware import Device, hardware_of
from omni_ds.plan.memory import Numerics
from omni_ds.plan.mesh import Mesh

_BUCKET = 500_000_000  # DeepSpeed's reduce_bucket_size


def settle_degrees(
    config: Config, world_size: int, device: Device, composition: Composition | None = None
) -> tuple[Config, Choice | None]:
    """The configuration with numbers for degrees that are "auto", and why these; None without a choice.

    Where no memory is known (a CPU, and no omni.hardware.device_memory_gib) they are 1. Reads the HF
    configurations only when it has to choose.

    Raises:
        UserError: no layout is legal, or none fits the memory.
    """
    asked, hardware = asked_degrees(config), hardware_of(config.omni.hardware, device)
    if None not in asked.values() or hardware.memory is None:
        return config, None
    composition = composition or read_composition(config, processors=False)
    gpu = on_gpu(config, device)
    least = prod(degree or 1 for degree in asked.values())  # processes that all given degrees divide
    resolved = resolve(with_degrees(config, dict.fromkeys(DEGREES, 1)), least, None, has_cuda=gpu)
    options = plan_options(resolved, composition)
    alone = build_plan(composition.llm, composition.encoders, Mesh(1, 1), replace(options, group_size=None))
    samples = example_samples(alone, config.train_batch_size, config.omni.data.max_length)
    pipe, tensor, sequence, expert = asked.values()
    choice = choose(
        composition.llm,
        composition.encoders,
        options,
        world_size,
        Degrees(pipe, tensor, sequence, expert),
        hardware,
        numerics_of(resolved, fused=gpu),
        samples,
    )
    mesh = choice.mesh
    found = dict(zip(DEGREES, (mesh.pipe, mesh.tensor, mesh.sequence, mesh.expert), strict=True))
    return with_degrees(config, found), choice


def on_gpu(config: Config, device: Device) -> bool:
    """Whether a plan is for a GPU: one is here, or its memory is given."""
    return device.memory is not None or config.omni.hardware.device_memory_gib != "auto"


def numerics_of(config: Config, *, fused: bool) -> Numerics:
    """How a resolved configuration holds numbers. fused: on a GPU."""
    zero = config.zero_optimization
    return Numerics(
        bf16=config.bf16.enabled is True,
        fused=fused,
        reduce_bucket=int(zero.reduce_bucket_size or _BUCKET),
        offload_optimizer=_on_host(zero.offload_optimizer),
        offload_param=_on_host(zero.offload_param),
        at_once=config.bf16.immediate_grad_update is not False,
    )


def _on_host(offload) -> bool:
    return offload is not None and offload.device != "none"
