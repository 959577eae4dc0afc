"""The learning rate schedule: DeepSpeed's classes, with one value for each parameter group.

DeepSpeed's WarmupLR, WarmupDecayLR, OneCycle and LRRangeTest take learning rates as arguments and, given a
scalar, set every group to it. They also take a list, one value a group: that is what is made here.
WarmupCosineLR takes ratios and keeps each group's own rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from omni_ds.config.nearest import did_you_mean
from omni_ds.config.optimizer import base_lr

if TYPE_CHECKING:
    from omni_ds.config.deepspeed import Scheduler
    from omni_ds.config.root import Config

_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")
_KNOWN = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": ("total_num_steps", *_WARMUP),
    "WarmupCosineLR": (
        "total_num_steps",
        "warmup_min_ratio",
        "warmup_num_steps",
        "cos_min_ratio",
        "warmup_type",
    ),
    "OneCycle": (
        "cycle_min_lr",
        "cycle_max_lr",
        "decay_lr_rate",
        "cycle_first_step_size",
        "cycle_second_step_size",
        "cycle_first_stair_count",
        "cycle_second_stair_count",
        "decay_step_size",
        "cycle_momentum",
        "cycle_min_mom",
        "cycle_max_mom",
        "decay_mom_rate",
    ),
    "LRRangeTest": (
        "lr_range_test_min_lr",
        "lr_range_test_step_size",
        "lr_range_test_step_rate",
        "lr_range_test_staircase",
    ),
}
# Arguments that are learning rates: as a share of the group's own rate when "auto" or absent.
_RATES = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 1.0},
    "WarmupDecayLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 1.0},
    "WarmupCosineLR": {},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0},
    "LRRangeTest": {"lr_range_test_min_lr": 1.0},
}
STEP_COUNTS = ("total_num_steps", "warmup_num_steps")
_POSITIVE_INTS = (*STEP_COUNTS, "lr_range_test_step_size", "cycle_first_step_size")


def scheduler_faults(scheduler: Scheduler) -> Iterator[str]:
    """Messages for unknown arguments, or arguments of the wrong kind."""
    known, rates = _KNOWN[scheduler.type], _RATES[scheduler.type]
    for key, value in scheduler.params.items():
        where = f"scheduler.params.{key}"
        if key not in known:
            yield f"{where}: {scheduler.type} has no such argument; {did_you_mean(key, known)}"
        elif value == "auto":
            if key not in rates and key not in STEP_COUNTS:
                yield f"{where}: auto is not possible here; give a value or remove it"
        elif key in _POSITIVE_INTS:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                yield f"{where}: got {value!r}, expected a whole number >= 1 or auto"
        elif key == "warmup_type":
            if value not in ("log", "linear"):
                yield f"{where}: got {value!r}, expected log or linear"
        elif key in ("cycle_momentum", "lr_range_test_staircase"):
            if not isinstance(value, bool):
                yield f"{where}: got {value!r}, expected true or false"
        elif isinstance(value, list):
            yield f"{where}: got a list, expected one number; other parts' rates are scaled with their own lr"
        elif not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
            yield f"{where}: got {value!r}, expected a number >= 0"


def scheduler_params(config: Config, group_lrs: Sequence[float]) -> dict[str, Any]:
    """Keyword arguments of `config.scheduler.type` for an optimizer whose groups have the rates `group_lrs`.

    A rate that the user wrote is the one of a group with the optimizer's `lr`; other groups get it times
    their own `lr` / that `lr`. The configuration has been resolved (no "auto" number of steps). Empty
    without a scheduler.
    """
    if config.scheduler is None:
        return {}
    params = dict(config.scheduler.params)
    assert not any(params.get(key) == "auto" for key in STEP_COUNTS), "resolve() comes first"
    base = base_lr(config)
    for key, default in _RATES[config.scheduler.type].items():
        value = params.get(key, "auto")
        share = default if value == "auto" or base == 0 else value / base
        params[key] = [lr * share for lr in group_lrs]
    return params
