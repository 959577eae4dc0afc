"""Predicted peaks against those measured on one H200 (benchmarks/reports/single_gpu_h200.md)."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

MEASURED = [  # model, tokens of a micro-batch, recomputed, GiB, bf16 gradients added to their sums at once
    ("qwen", 10240, "none", 119.6, True),
    ("qwen", 8192, "none", 107.7, True),
    ("qwen", 8192, "encoders", 98.1, False),
    ("qwen", 16384, "encoders", 100.8, True),
    ("qwen", 40960, "all", 82.0, True),
    ("composed", 24576, "none", 122.0, True),
    ("moe", 24576, "none", 130.6, True),
    ("moe", 16384, "none", 109.0, False),
    ("frozen", 24576, "none", 70.2, False),
]


@pytest.mark.parametrize(
    "case",
    [
        case if case[:2] == ("frozen", 24576) else pytest.param(case, marks=pytest.mark.full)
        for case in MEASURED
    ],
)
def test_peak(case: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.parts import single_gpu_models
    from benchmarks.single_gpu import draw_samples
    from omni_ds.composition import complete, plan_of, read_composition
    from omni_ds.config.load import load_config
    from omni_ds.config.resolve import resolve
    from omni_ds.layout import numerics_of
    from omni_ds.plan.activations import Load
    from omni_ds.plan.build import build_step
    from omni_ds.plan.memory import rank_memory

    model, budget, recompute, measured, at_once = case
    # sizes are enough, without weights
    monkeypatch.setattr(single_gpu_models, "qwen_folder", lambda options: single_gpu_models.QWEN)
    options = argparse.Namespace(tiny=False, recompute=recompute, longest=False, layers=0)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(single_gpu_models.configuration(model, budget, options)))
    config = resolve(complete(load_config(path, ())), 1, None, has_cuda=True)
    plan = plan_of(config, read_composition(config, processors=False), 1)
    step = build_step(plan, 0, draw_samples(plan, qwen=model == "qwen"))
    numerics = replace(numerics_of(config, fused=True), at_once=at_once)
    peak = rank_memory(plan, 0, Load.of(step), numerics).peak
    assert peak / 2**30 == pytest.approx(measured, rel=0.05)
