"""Conversions of transformers undone: the tensors of a checkpoint, by name, shape and value."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from models.originals import Originals
from models.weight_names import map_names
from models.weights import PartWeights, WeightSource

SIZES = {
    "vocab_size": 8,
    "hidden_size": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 3,
}


def vision_model():
    config = Qwen3VLMoeConfig(
        text_config=SIZES | {"head_dim": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        vision_config={"depth": 0, "hidden_size": 4, "num_heads": 1, "deepstack_visual_indexes": []},
    )
    return Qwen3VLMoeForConditionalGeneration(config)


def opened(folder: Path, tensors: dict[str, torch.Tensor], build):
    """(source, model on meta, weights by the names of its class)."""
    save_file(tensors, folder / "model.safetensors")
    with torch.device("meta"):
        model = build()
    source = WeightSource(str(folder))
    names = map_names(source.names(), model, shape_of=source.shape)
    return source, names, PartWeights(source, "", model, names, lambda _: True)


def written(source, names, weights) -> dict[str, torch.Tensor]:
    """What comes out when every tensor of the class comes by."""
    fake = SimpleNamespace(
        names=names,
        source=source,
        model=weights.model,
        recipes_of=lambda name: {name: names.recipes[name]},
    )
    originals, out = Originals(fake), {}
    for name in names.recipes:
        for original, value in originals(name, weights.read(name)):
            assert original not in out
            out[original] = value
    return out


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_experts_come_apart_in_order(tmp_path: Path) -> None:
    """Expert 10 is behind expert 9, gate and up keep their halves."""
    tensors = {
        f"model.layers.{layer}.mlp.experts.{e}.{n}_proj.weight": torch.randn(
            (4, 3) if n == "down" else (3, 4)
        )
        for layer in range(2)
        for e in range(12)
        for n in ("gate", "up", "down")
    }
    config = AutoConfig.for_model("qwen3_moe", **SIZES)
    assert_same(
        tensors, written(*opened(tmp_path, tensors, lambda: AutoModelForCausalLM.from_config(config)))
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_transposed_experts_turn_back(
    transposed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As today's class or as the hub has them; of both, only the experts asked for are read."""
    prefix = "model.language_model.layers.1.mlp.experts."
    tensors = {f"{prefix}gate_up_proj": torch.randn(12, 6, 4), f"{prefix}down_proj": torch.randn(12, 4, 3)}
    expected = dict(tensors)
    if transposed:
        tensors = {name: value.transpose(1, 2).contiguous() for name, value in tensors.items()}
    source, names, weights = opened(tmp_path, tensors, vision_model)
    assert_same(tensors, written(source, names, weights))
    read, original = [], WeightSource.read
    monkeypatch.setattr(
        WeightSource, "read", lambda self, name, index=None: read.append(index) or original(self, name, index)
    )
    for name, value in expected.items():
        for first in (3, 7):
            index = (slice(first, first + 2), slice(1, 3))
            assert torch.equal(weights.read(name, index), value[index])
    assert all(index[0] in (slice(3, 5), slice(7, 9)) for index in read) and len(read) == 4
