"""Replace every "auto" and check the degrees against the number of processes. Done once, by rank 0."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from omni_ds.config.root import Config
from omni_ds.config.scheduler import STEP_COUNTS
from omni_ds.errors import UserError

_WARMUP_SHARE = Fraction(3, 100)
_NEEDS_TOTAL = ("WarmupDecayLR", "WarmupCosineLR")


DEGREES = (
    "pipeline.stages",
    "tensor_parallel.autotp_size",
    "sequence_parallel_size",
    "expert_parallel.autoep_size",
)


def asked_degrees(config: Config) -> dict[str, int | None]:
    """The parallel degrees that the configuration asks for, by key; None: "auto"."""
    given = (
        config.pipeline.stages,
        config.tensor_parallel.autotp_size or 1,
        config.sequence_parallel_size,
        1 if config.expert_parallel.enabled is False else config.expert_parallel.autoep_size,
    )
    return {key: None if value == "auto" else value for key, value in zip(DEGREES, given, strict=True)}


def with_degrees(config: Config, degrees: Mapping[str, int]) -> Config:
    """The configuration with these numbers in the place of "auto" degrees."""
    values = config.to_dict()
    for key, asked in asked_degrees(config).items():
        if asked is None:
            *path, last = key.split(".")
            section = values
            for name in path:
                section = section[name]
            section[last] = degrees[key]
    return Config.model_validate(values)


def resolve(config: Config, world_size: int, dataset_rows: int | None, *, has_cuda: bool = False) -> Config:
    """The configuration without "auto", for `world_size` processes.

    `dataset_rows`: usable training samples, which `num_train_epochs` is counted in; the result has
    `max_steps` only. None leaves a run counted in epochs, and its schedule, open (`--plan` needs no data).
    `has_cuda`: there is a GPU, so that bf16 "auto" means true. Degrees that nothing has chosen
    (omni_ds.layout) are 1.
    UserError when the degrees do not divide the processes, or a monitor's package is missing.
    """
    assert world_size >= 1
    config = with_degrees(config, dict.fromkeys(DEGREES, 1))
    _check_world(config, world_size)
    _check_monitors(config)
    steps = total_steps(config, dataset_rows)
    values = config.to_dict()
    if config.activation_checkpointing is not None and config.pipeline.activation_checkpoint_interval == 0:
        values["pipeline"]["activation_checkpoint_interval"] = 1
    if config.gradient_accumulation_steps == "auto":
        del values["gradient_accumulation_steps"]
    if config.gradient_clipping == "auto":
        values["gradient_clipping"] = 1.0
    if config.bf16.enabled == "auto":
        values["bf16"]["enabled"] = has_cuda
    values["fp16"]["enabled"] = False
    if values["bf16"]["enabled"]:
        values["data_types"].setdefault("grad_accum_dtype", "fp32")
    elif config.data_types.grad_accum_dtype == "bf16":  # bf16 was "auto", and there is no GPU
        values["data_types"]["grad_accum_dtype"] = "fp32"
    for monitor in ("tensorboard", "csv_monitor"):
        values[monitor]["output_path"] = (
            values[monitor]["output_path"] or f"{config.omni.output_dir}/{monitor}"
        )
    if steps is not None:
        values["omni"]["train"].pop("num_train_epochs", None)
        values["omni"]["train"]["max_steps"] = steps
        if config.scheduler is not None:
            values["scheduler"]["params"] = _schedule(config.scheduler.type, config.scheduler.params, steps)
    return Config.model_validate(values)


def total_steps(config: Config, dataset_rows: int | None) -> int | None:
    """Optimizer steps of the run: `max_steps`, or epochs * rows / batch rounded up; None when rows are
    unknown."""
    train = config.omni.train
    if train.max_steps is not None:
        return train.max_steps
    if dataset_rows is None:
        return None
    return epoch_steps(train.num_train_epochs, dataset_rows, config.train_batch_size)


def epoch_steps(epochs: float, rows: int, batch_size: int) -> int:
    """Steps of `batch_size` samples that see `epochs` times `rows` samples, rounded up, at least one."""
    return max(1, math.ceil(Fraction(str(epochs)) * rows / batch_size))


def _schedule(kind: str, params: dict[str, Any], steps: int) -> dict[str, Any]:
    resolved = dict(params)
    if kind in _NEEDS_TOTAL:
        resolved.setdefault("total_num_steps", "auto")
    total, warmup = STEP_COUNTS
    if resolved.get(total) == "auto":
        resolved[total] = steps
    if resolved.get(warmup) == "auto":
        resolved[warmup] = max(1, math.ceil(_WARMUP_SHARE * steps))
    return resolved


def _check_world(config: Config, world_size: int) -> None:
    stages, tensor, sequence, _ = asked_degrees(config).values()
    lane = sequence * tensor
    if world_size % (stages * lane) == 0:
        _check_experts(config.expert_parallel.degree, world_size // (stages * tensor))
        return
    if world_size % lane:
        raise UserError(
            f"sequence_parallel_size {sequence} x tensor_parallel.autotp_size {tensor} = {lane} does not "
            f"divide {world_size} processes; start a multiple of {lane} processes"
        )
    most = world_size // lane
    legal = [degree for degree in range(1, most + 1) if most % degree == 0]
    closest = sorted(sorted(legal, key=lambda degree: (abs(degree - stages), degree))[:2])
    raise UserError(
        f"pipeline.stages {stages} x sequence_parallel_size {sequence} x tensor_parallel.autotp_size "
        f"{tensor} = {stages * lane} does not divide {world_size} processes; the nearest legal "
        f"pipeline.stages: {' or '.join(map(str, closest))}; or start a multiple of {stages * lane} processes"
    )


def _check_experts(degree: int, data_degree: int) -> None:
    if data_degree % degree == 0:
        return
    legal = [d for d in range(1, data_degree + 1) if data_degree % d == 0]
    closest = sorted(sorted(legal, key=lambda d: (abs(d - degree), d))[:2])
    raise UserError(
        f"expert_parallel.autoep_size {degree} does not divide the {data_degree} ranks (data x sequence) of "
        f"a stage; the nearest that do: {' or '.join(map(str, closest))}"
    )


def _check_monitors(config: Config) -> None:
    for monitor, package in (("tensorboard", "tensorboard"), ("wandb", "wandb")):
        if getattr(config, monitor).enabled and importlib.util.find_spec(package) is None:
            raise UserError(
                f"{monitor}.enabled: the package {package} is not installed; pip install {package}, or "
                "set it to false"
            )
