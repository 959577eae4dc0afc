"""A resumed schedule continues as if it had never stopped, for every schedule DeepSpeed has."""

import json
from pathlib import Path

import pytest
import torch

from omni_ds.config import validate
from omni_ds.engine.optimizers import Schedules

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "WarmupLR": {"warmup_num_steps": 3},
    "WarmupDecayLR": {"warmup_num_steps": 3, "total_num_steps": 12},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 12, "warmup_type": "linear"},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 4},
    "LRRangeTest": {"lr_range_test_step_size": 2},
}


def schedules(kind: str) -> tuple[Schedules, torch.optim.AdamW]:
    raw = json.loads((ROOT / "ds_configs" / "omni.json").read_text())
    raw["scheduler"] = {"type": kind, "params": KINDS[kind]}
    weights = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    groups = [
        {"params": [weight], "lr": lr, "name": name}
        for weight, lr, name in zip(weights, (1e-3, 6e-4), ("llm", "vision"), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    return Schedules(validate(raw), [optimizer]), optimizer


def settings(optimizer: torch.optim.AdamW) -> list[tuple]:
    return [(group["lr"], tuple(group["betas"])) for group in optimizer.param_groups]


@pytest.mark.parametrize("kind", KINDS)
def test_resume_repeats_an_uninterrupted_run(kind: str) -> None:
    whole, of_whole = schedules(kind)
    history = []
    for _ in range(9):
        whole.step()
        history.append(settings(of_whole))
    assert len({str(entry) for entry in history}) > 1, "the schedule did not move"
    first, _ = schedules(kind)
    for _ in range(4):
        first.step()
    resumed, of_resumed = schedules(kind)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert settings(of_resumed) == history[3]
    for expected in history[4:]:
        resumed.step()
        assert settings(of_resumed) == expected


def test_rates_keep_their_ratio() -> None:
    for kind in KINDS:
        both, optimizer = schedules(kind)
        for _ in range(6):
            both.step()
        first, second = (rate for rate, _ in settings(optimizer))
        assert second == pytest.approx(0.6 * first), kind
