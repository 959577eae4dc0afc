"""Tensor-parallel layers on forked ranks against HF's model in one process.

Losses, argmax, gradients of features and of every parameter, DeepSpeed's norm, and what is read to load them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from omni_ds.parallel.layer_groups import ALONE
from tests.parity.tensor_cases import Case, RankResult, Run, all_on_rank, on_rank, reference
from tests.ranks import run_ranks

THREE_ONE = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8}
CASES = {
    2: [
        Case("qwen3", "qwen3", {"intermediate_size": 47}, grown=9),
        Case("qwen3-3-heads-1-kv", "qwen3", THREE_ONE | {"tie_word_embeddings": False}, recompute=True),
        Case("qwen2-3-heads-1-kv", "qwen2-sliding-half", THREE_ONE | {"intermediate_size": 47}),
        Case("llama-bias", "llama-tied-rope-bias", {"tie_word_embeddings": False}, recompute=True, grown=9),
        Case("mistral", "mistral-sliding", {"intermediate_size": 47}),
        Case("gemma3", "gemma3", {"intermediate_size": 47, "num_hidden_layers": 2}, recompute=True),
        Case("frozen-one-feature", "qwen3", {}, frozen=True, media=1, recompute=True),
        Case("bf16", "qwen3", {"intermediate_size": 47}, dtype=torch.bfloat16),
        Case("bf16-3-heads-1-kv", "qwen3", THREE_ONE, dtype=torch.bfloat16, recompute=True),
    ],
    4: [
        Case("qwen3-4-heads-1-kv", "qwen3", {"num_key_value_heads": 1, "intermediate_size": 47}),
        Case("llama-bias-4-heads-2-kv", "llama-tied-rope-bias", {}, recompute=True),
        Case(
            "qwen2-6-heads-3-kv",
            "qwen2-sliding-half",
            {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
        ),
        Case(
            "qwen3-10-heads-5-kv",
            "qwen3",
            {"num_attention_heads": 10, "num_key_value_heads": 5, "tie_word_embeddings": False},
            recompute=True,
        ),
    ],
}
ALL = [(world, case.label) for world, cases in CASES.items() for case in cases]


@dataclass
class Outcome:
    """The reference (fp32, one process), all ranks, and our layers in one process: in bf16, how far rounding
    alone is from the reference."""

    case: Case
    expected: Run
    values: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    ranks: list[RankResult]
    alone: RankResult

    @property
    def half(self) -> bool:
        return self.case.dtype == torch.bfloat16

    def assert_near(self, got: Tensor, expected: Tensor, what: str, alone: Tensor) -> None:
        """1e-5 of the largest element in fp32; in bf16 at most twice the error of bf16 in one process."""
        if self.half:
            error, usual = ((x.float() - expected).norm() / expected.norm() for x in (got, alone))
            assert error <= 2 * usual + 2**-8, f"{what}: relative error {error}, in one process {usual}"
            return
        scale, difference = expected.abs().max().item(), (got - expected).abs().max().item()
        assert difference <= 1e-5 * scale, f"{what}: differs by {difference}, the largest is {scale}"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory):
    """(world, label) -> Outcome; one fork a world."""

    @cache
    def of(world: int) -> dict[str, Outcome]:
        folder: Path = tmp_path_factory.mktemp(f"tensor-{world}")
        known = {}
        for case in CASES[world]:
            case.folder = folder / case.label
            known[case.label] = (*reference(case), on_rank(case, ALONE))
        ranks = run_ranks(all_on_rank, world, CASES[world], world)
        return {
            case.label: Outcome(
                case, *known[case.label][:3], [rank[i] for rank in ranks], known[case.label][3]
            )
            for i, case in enumerate(CASES[world])
        }

    return lambda world, label: of(world)[label]


@pytest.mark.parametrize(("world", "label"), ALL)
def test_losses_and_feature_gradients(outcomes, world: int, label: str) -> None:
    outcome: Outcome = outcomes(world, label)
    expected, ranks, alone = outcome.expected, outcome.ranks, outcome.alone
    for rank in ranks:
        assert all(torch.equal(a, b) for a, b in zip(rank.losses, ranks[0].losses, strict=True))
        for i in range(2):
            assert rank.losses[i].dtype == rank.scores[i].dtype == torch.float32
            outcome.assert_near(rank.losses[i], expected.losses[i], "losses", alone.losses[i])
            outcome.assert_near(rank.scores[i][0], expected.losses[i], "evaluation", alone.scores[i][0])
            assert outcome.half or torch.equal(rank.scores[i][1], expected.scores[i][1])
    for i, theirs in enumerate(expected.features):
        ours = torch.cat([rank.features[i] for rank in ranks])
        outcome.assert_near(ours, theirs, "features", alone.features[i])


@pytest.mark.parametrize(("world", "label"), ALL)
def test_every_parameter_gradient_and_the_norm(outcomes, world: int, label: str) -> None:
    outcome: Outcome = outcomes(world, label)
    gradients, ranks = outcome.gradients, outcome.ranks
    if outcome.case.frozen:
        assert all(held.gradient is None for rank in ranks for held in rank.held)
        return
    alone = {held.name: held.gradient for held in outcome.alone.held}
    counted: dict[str, int] = Counter()
    squared = torch.zeros((), dtype=torch.float64)
    for rank in ranks:
        assert {held.name for held in rank.held} == set(gradients)
        for held in rank.held:
            part = held.region.index
            outcome.assert_near(held.gradient, gradients[held.name][part], held.name, alone[held.name][part])
            if held.counted:
                counted[held.name] += held.region.elements
                squared += held.gradient.double().square().sum()
    assert counted == {name: gradient.numel() for name, gradient in gradients.items()}
    expected = sum(gradient.double().square().sum() for gradient in gradients.values())
    assert abs(squared - expected) <= (1e-2 if outcome.half else 1e-5) * expected


@pytest.mark.parametrize(("world", "label"), ALL)
def test_loading_reads_the_slices_and_no_more(outcomes, world: int, label: str) -> None:
    outcome: Outcome = outcomes(world, label)
    for rank in outcome.ranks:
        for held in rank.held:
            whole = outcome.values[held.name].to(outcome.case.dtype)[held.region.index]
            if outcome.case.grown:  # new rows are a mean
                torch.testing.assert_close(held.value, whole, rtol=1e-5, atol=1e-7)
            else:
                assert torch.equal(held.value, whole), held.name
        if not outcome.case.grown:
            assert set(Counter(rank.reads).values()) == {1}
            assert rank.bytes_read == sum(held.region.elements * 4 for held in rank.held)
    assert all(any(not held.region.is_whole for held in rank.held) for rank in outcome.ranks)


@pytest.mark.parametrize(("world", "label"), ALL)
def test_fresh_weights_do_not_depend_on_the_layout(outcomes, world: int, label: str) -> None:
    outcome: Outcome = outcomes(world, label)
    whole = {held.name: held.value for held in outcome.alone.fresh}
    for rank in outcome.ranks:
        assert {held.name for held in rank.fresh} == set(whole)
        for held in rank.fresh:
            assert held.value.dtype == outcome.case.dtype
            assert torch.equal(held.value, whole[held.name][held.region.index]), held.name
    assert not whole["llm.model.embed_tokens.weight"][0].any()  # the padding row
