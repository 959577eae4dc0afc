"""Layers whose norms hand their input on, against HF's forwards of the same layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from models import fused
from models.encoders import build_encoder
from models.init import init_module
from models.llm import build_llm_layers
from models.packed import StageState
from omni_ds.config import EncoderConfig
from omni_ds.plan.llm_meta import SUPPORTED
from tests.unit.model_helpers import INNER_LLMS, LLMS, QWEN_TOWERS, llm_config, packed_batch
from tests.unit.test_linears import gradients


@pytest.fixture(autouse=True)
def _without_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels do not take a CPU's tensors, wherever this runs."""
    monkeypatch.setattr(fused, "has_liger", lambda: False)


def runs_residual_layer(layer: nn.Module) -> bool:
    return getattr(layer.forward, "__func__", None) is fused._residual_layer


@pytest.mark.parametrize("name", [*LLMS, *INNER_LLMS])
def test_decoder_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = [
        definition.build() for definition in build_llm_layers(AutoConfig.for_model(**llm_config(name)))[1:-2]
    ]
    for layer in layers:
        init_module(layer, layer.hf_names(), seed=0, std=0.1)
        assert runs_residual_layer(layer.layer) == (name != "gemma3")  # which has four norms
    results = []
    for quick in (False, True):
        monkeypatch.setattr(fused, "_on_gpu", lambda x, quick=quick: quick)
        batch = packed_batch((9, 5, 1), vocab=61)
        if name in INNER_LLMS:
            batch.position_ids = batch.position_ids.expand(3, -1)
        state = StageState(batch)
        state.hidden = hidden = torch.randn(
            15, 32, generator=torch.Generator().manual_seed(2)
        ).requires_grad_()
        copies = [copy.deepcopy(layer) for layer in layers]
        for layer in copies:
            state = layer(state)
        leaves = [p for layer in copies for p in layer.parameters()]
        results.append((state.hidden, gradients(state.hidden, hidden, *leaves)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_every_llm_is_among_them() -> None:
    assert {llm_config(name)["model_type"] for name in (*LLMS, *INNER_LLMS)} == set(SUPPORTED)


@pytest.mark.parametrize("kind", list(QWEN_TOWERS))
def test_blocks_of_qwen_towers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    encoder = build_encoder("v", EncoderConfig(), AutoConfig.for_model(**QWEN_TOWERS[kind]), 24)
    assert sum(map(runs_residual_layer, encoder.modules())) == 3
    values, results = [torch.randn(3, *size) for size in ((40, 24), (16, 32))], []
    for quick in (False, True):
        monkeypatch.setattr(fused, "_on_gpu", lambda x, quick=quick: quick)
        one = copy.deepcopy(encoder)
        assert sum(map(runs_residual_layer, one.modules())) == 3
        rows = one(values)
        results.append((rows, gradients(rows, *one.parameters())))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
