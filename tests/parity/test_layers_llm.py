"""Packed pipeline layers against HF's causal LM run on each sample alone: losses, argmax, every gradient."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from models.llm import LayerDef, build_llm_layers
from models.packed import PackedBatch, StageState
from tests.unit.model_helpers import LLMS, llm_config, packed_batch

LENGTHS = (9, 5, 1, 9, 23, 6)


def build(definitions: list[LayerDef]) -> list[torch.nn.Module]:
    """Modules as one stage holds them: layers of one tied key are one module."""
    tied: dict[str, torch.nn.Module] = {}
    modules = []
    for definition in definitions:
        module = tied.get(definition.tied_key) or definition.build()
        if definition.tied_key:
            tied[definition.tied_key] = module
        modules.append(module)
    return modules


def run(definitions: list[LayerDef], modules: list[torch.nn.Module], batch: PackedBatch) -> torch.Tensor:
    state = StageState(batch)
    for definition, module in zip(definitions, modules, strict=True):
        state = definition.forward_fn(module, state) if definition.forward_fn else module(state)
    return state


def global_parameters(modules: list[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    return {
        name: module.get_parameter(local) for module in modules for local, name in module.hf_names().items()
    }


def pair(name: str, recompute: bool = False, **changes: object):
    torch.manual_seed(0)
    config = AutoConfig.for_model(**llm_config(name, **changes))
    reference = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    with torch.no_grad():
        for parameter in reference.parameters():  # biases and norms too, or a lost one would not show
            parameter.add_(torch.randn_like(parameter) * 0.1)
    definitions = build_llm_layers(config, recompute=recompute)
    modules = build(definitions)
    ours = global_parameters(modules)
    with torch.no_grad():
        for parameter_name, parameter in reference.named_parameters():
            ours[f"llm.{parameter_name}"].copy_(parameter)
    assert set(ours) == {f"llm.{n}" for n, _ in reference.named_parameters()}
    return reference, definitions, modules, ours


def reference_loss(reference, batch: PackedBatch, embeds: torch.Tensor | None = None):
    """(sum of losses, logits [N, V]) sample by sample."""
    logits, start = [], 0
    for length in batch.segments:
        rows = slice(start, start + length)
        inputs = (
            {"input_ids": batch.input_ids[rows][None]}
            if embeds is None
            else {"inputs_embeds": embeds[rows][None]}
        )
        logits.append(reference(**inputs, use_cache=False).logits[0, :-1])
        start += length
    logits = torch.cat(logits)
    return F.cross_entropy(logits, batch.target_ids, reduction="sum"), logits


def assert_same_losses(losses: torch.Tensor, logits: torch.Tensor, batch: PackedBatch) -> None:
    expected = F.cross_entropy(logits, batch.target_ids, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)


def assert_same_gradients(reference, ours) -> None:
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        scale = parameter.grad.abs().max().item()
        difference = (ours[f"llm.{name}"].grad - parameter.grad).abs().max().item()
        assert difference <= 1e-5 * scale, f"{name}: gradients differ by {difference}, largest is {scale}"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", list(LLMS))
def test_equals_separate_samples(name: str, recompute: bool) -> None:
    reference, definitions, modules, ours = pair(name, recompute)
    batch = packed_batch(LENGTHS, vocab=61)
    expected_loss, expected = reference_loss(reference, batch)
    expected_loss.backward()
    losses = run(definitions, modules, batch)
    losses.sum().backward()
    assert_same_losses(losses, expected, batch)
    torch.testing.assert_close(losses.sum(), expected_loss, rtol=1e-5, atol=0)
    assert_same_gradients(reference, ours)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_evaluation_scores(name: str) -> None:
    reference, definitions, modules, _ = pair(name)
    batch = packed_batch(LENGTHS, vocab=61)
    _, logits = reference_loss(reference, batch)
    batch.target_ids[::2] = logits.argmax(-1)[::2]
    losses, correct = run(definitions, [module.eval() for module in modules], batch)
    assert_same_losses(losses, logits, batch)
    assert torch.equal(correct > 0, logits.argmax(-1) == batch.target_ids) and 0 < correct.mean() < 1


def test_sliding_window_matters() -> None:
    """The window of the Mistral case is shorter than its samples, or the case above would prove nothing."""
    _, definitions, modules, ours = pair("mistral-sliding")
    batch = packed_batch(LENGTHS, vocab=61)
    sliding = run(definitions, modules, batch)
    full_definitions = build_llm_layers(
        AutoConfig.for_model(**llm_config("mistral-sliding", sliding_window=None))
    )
    full_modules = build(full_definitions)
    for name, parameter in global_parameters(full_modules).items():
        parameter.data.copy_(ours[name])
    assert (run(full_definitions, full_modules, batch) - sliding).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_features_replace_placeholders(name: str) -> None:
    reference, definitions, modules, ours = pair(name)
    batch = packed_batch((9, 5, 8), vocab=61)
    positions = torch.tensor([10, 2, 3, 15])
    features = torch.randn(4, 32, requires_grad=True)
    twin = features.detach().clone().requires_grad_()
    batch.feature_positions, batch.features = positions, features
    embeds = reference.get_input_embeddings()(batch.input_ids)
    mask = torch.zeros(22, 1, dtype=torch.bool).index_fill(0, positions, True)
    order = positions.argsort()
    embeds = embeds.masked_scatter(mask, twin[order])
    expected_loss, expected = reference_loss(reference, batch, embeds)
    expected_loss.backward()
    losses = run(definitions, modules, batch)
    losses.sum().backward()
    assert_same_losses(losses, expected, batch)
    torch.testing.assert_close(features.grad, twin.grad, rtol=1e-5, atol=1e-5)
    assert_same_gradients(reference, ours)


def test_bf16_keeps_rotary_in_fp32() -> None:
    """A bf16 copy of the layers follows a bf16 HF model whose frequencies were never rounded."""
    reference, definitions, modules, ours = pair("llama", max_position_embeddings=4096)
    frequencies = reference.model.rotary_emb.inv_freq.clone()
    reference.bfloat16()
    reference.model.rotary_emb.inv_freq = frequencies
    for module in modules:
        module.bfloat16()
    batch = packed_batch((40, 7), vocab=61)
    batch.position_ids = batch.position_ids + 3000
    hidden = modules[0](StageState(batch)).hidden
    cos, sin = modules[1]._rotary(hidden.unsqueeze(0), batch.position_ids.unsqueeze(0))
    expected = reference.model.rotary_emb(hidden.unsqueeze(0), batch.position_ids.unsqueeze(0))
    assert cos.dtype == torch.bfloat16
    assert torch.equal(cos, expected[0]) and torch.equal(sin, expected[1])


def test_empty_micro_batch_has_zero_gradients() -> None:
    _, definitions, modules, ours = pair("qwen3")
    losses = run(definitions, modules, packed_batch((), vocab=61))
    assert losses.shape == (0,) and losses.dtype == torch.float32
    losses.sum().backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in ours.values())
