"""Experts from checkpoints: fused or one tensor an expert, a rank's own experts alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from models.weights import llm_weights
from tests.unit.model_helpers import llm_config

GATE_UP, DOWN = (f"llm.model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))
EXPERTS = 12  # sorted as text, expert 10 comes before expert 2


def _saved(folder: Path, name: str, fused: bool) -> dict[str, torch.Tensor]:
    changes = {"num_local_experts": EXPERTS} if name == "mixtral" else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**llm_config(name, **changes)))
    model.save_pretrained(folder, save_original_format=not fused)
    with safe_open(folder / "model.safetensors", "pt") as file:
        stacked = [key for key in file.keys() if "gate_up_proj" in key]  # noqa: SIM118  not a mapping
    assert bool(stacked) == fused
    return {f"llm.{key}": value for key, value in model.state_dict().items()}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-mixed"])
def test_experts_come_in_their_order(tmp_path: Path, name: str, fused: bool) -> None:
    whole = _saved(tmp_path, name, fused)
    weights = llm_weights(str(tmp_path), AutoConfig.from_pretrained(tmp_path))
    weights.source.read = None  # nothing may be read
    for key, value in whole.items():
        assert torch.equal(weights.read(key), value), key
    weights.check()


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-mixed"])
def test_a_rank_reads_its_own_experts(tmp_path: Path, name: str) -> None:
    whole = _saved(tmp_path, name, fused=False)
    weights = llm_weights(str(tmp_path), AutoConfig.from_pretrained(tmp_path))
    seen, read = [], weights.source.read
    weights.source.read = lambda key, index=None: (seen.append(key), read(key, index))[1]
    width, rows = whole[GATE_UP].shape[1] // 2, slice(8, 12)
    for half in (slice(0, width), slice(width, 2 * width)):
        assert torch.equal(weights.read(GATE_UP, (rows, half)), whole[GATE_UP][rows, half])
    assert torch.equal(weights.read(DOWN, (rows, slice(None))), whole[DOWN][rows])
    assert len(seen) == 3 * 4 == len(set(seen)), "each tensor of this rank's experts once, no other"


@pytest.mark.parametrize("fused", [True, False])
def test_shapes_are_known_without_reading(tmp_path: Path, fused: bool) -> None:
    whole = _saved(tmp_path, "qwen3-moe-mixed", fused)
    weights = llm_weights(str(tmp_path), AutoConfig.from_pretrained(tmp_path))
    weights.source.read = None  # nothing may be read
    for key in (GATE_UP, DOWN, "llm.model.norm.weight"):
        assert weights.shape(key) == tuple(whole[key].shape)
