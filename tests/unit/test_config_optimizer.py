"""Optimizer and schedule: what is built, and that every group keeps its own rate."""

import pytest

from omni_ds.config import optimizer_spec, resolve, scheduler_params, validate
from tests.unit.config_helpers import minimal


def test_optimizer_defaults_are_written_out():
    assert optimizer_spec(validate(minimal(optimizer={}))) == {
        "type": "AdamW",
        "params": {"lr": 1e-5, "weight_decay": 0.0},
        "by_deepspeed": False,
    }
    auto = {"type": "adamw", "params": {key: "auto" for key in ("lr", "betas", "eps", "weight_decay")}}
    assert optimizer_spec(validate(minimal(optimizer=auto)))["params"] == {
        "lr": 1e-5,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }


@pytest.mark.parametrize(
    ("given", "built", "by_deepspeed"),
    [
        ({"type": "Adam"}, "AdamW", False),
        ({"type": "Adam", "params": {"adam_w_mode": False, "torch_adam": True}}, "Adam", False),
        ({"type": "SGD", "params": {"momentum": 0.9}}, "SGD", False),
        ({"type": "FusedAdam"}, "FusedAdam", True),
        ({"type": "DeepSpeedCPUAdam"}, "CPUAdam", True),
    ],
)
def test_optimizer_types(given, built, by_deepspeed):
    spec = optimizer_spec(validate(minimal(optimizer=given)))
    assert (spec["type"], spec["by_deepspeed"]) == (built, by_deepspeed)
    assert not spec["params"].keys() & {"torch_adam"}
    assert by_deepspeed or "adam_w_mode" not in spec["params"]


GROUPS = (1e-3, 1e-5, 0.0)


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ({"type": "WarmupLR"}, {"warmup_min_lr": (0, 0, 0), "warmup_max_lr": GROUPS}),
        (
            {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 2e-3}},
            {"warmup_min_lr": (1e-4, 1e-6, 0), "warmup_max_lr": (2e-3, 2e-5, 0)},
        ),
        (
            {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_max_lr": "auto"}},
            {"warmup_min_lr": (0, 0, 0), "warmup_max_lr": GROUPS},
        ),
        ({"type": "OneCycle"}, {"cycle_min_lr": (1e-4, 1e-6, 0), "cycle_max_lr": GROUPS}),
        ({"type": "LRRangeTest"}, {"lr_range_test_min_lr": GROUPS}),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": 10}}, {}),
    ],
)
def test_schedule_has_one_rate_a_group(scheduler, expected):
    params = scheduler_params(validate(minimal(scheduler=scheduler)), GROUPS)
    rates = {key: value for key, value in params.items() if isinstance(value, list)}
    assert rates.keys() == expected.keys()
    for key, values in expected.items():
        assert rates[key] == pytest.approx(values)
    given = scheduler.get("params", {})
    assert params.items() >= {key: given[key] for key in given.keys() - rates.keys()}.items()


def test_no_schedule_has_no_arguments():
    assert scheduler_params(validate(minimal()), GROUPS) == {}


@pytest.mark.slow
def test_schedules_are_deepspeed_s():
    """DeepSpeed's classes take what is made for them, and every group keeps its own rate."""
    import torch
    from deepspeed.runtime import lr_schedules

    for kind in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"):
        config = resolve(validate(minimal(scheduler={"type": kind})), 1, None)
        weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        groups = [{"params": [weight], "lr": lr} for weight, lr in zip(weights, GROUPS, strict=False)]
        optimizer = torch.optim.AdamW(groups)
        schedule = getattr(lr_schedules, kind)(optimizer, **scheduler_params(config, GROUPS[:2]))
        for _ in range(5):
            schedule.step()
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert first > 0 and first / second == pytest.approx(GROUPS[0] / GROUPS[1]), kind
