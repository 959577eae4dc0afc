"""The measured time model: fitting, versions, and what it may and may not change in a plan."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from omni_ds.plan.actions import Kind
from omni_ds.plan.build import build_step
from omni_ds.plan.times import Observation, TimeBook, TimeModel, fit, llm_key
from omni_ds.plan.validate import validate_step
from tests.unit.plan_cases import plan_of, random_samples


def test_fit_finds_the_coefficients_it_was_made_from() -> None:
    rng = random.Random(3)
    rows = []
    for _ in range(200):
        lengths = [rng.randint(16, 900) for _ in range(rng.randint(1, 9))]
        tokens, squares = sum(lengths), sum(n * n for n in lengths)
        exact = 2_000_000 + 700 * tokens + 0.25 * squares
        rows.append(Observation("F.0", (tokens, squares), round(exact * rng.uniform(0.97, 1.03))))
    model = fit(rows, from_step=9)
    for lengths in ([100], [900, 900, 16], [500] * 8):
        tokens, squares = sum(lengths), sum(n * n for n in lengths)
        exact = 2_000_000 + 700 * tokens + 0.25 * squares
        assert model.predict("F.0", (tokens, squares)) == pytest.approx(exact, rel=0.03)


def test_fit_never_predicts_negative_times() -> None:
    # Larger is faster here: a plain least squares line would fall below zero.
    rows = [Observation("EF", (10 * i, 100 * i * i), 1_000_000 - 9_000 * i) for i in range(1, 100)]
    model = fit(rows, from_step=1)
    assert all(value >= 0 for value in model.coefficients["EF"])
    assert model.predict("EF", (10**9, 10**12)) >= 1


def test_a_step_uses_the_newest_version_that_is_in_force() -> None:
    book = TimeBook([TimeModel(8, {"F.0": (1, 0, 0)}), TimeModel(20, {"F.0": (2, 0, 0)})])
    assert book.at(7) is None
    assert [book.at(step).coefficients["F.0"][0] for step in (8, 19, 20, 500)] == [1, 1, 2, 2]
    assert TimeBook.from_json(book.to_json()).to_json() == book.to_json()


def slow_encoders(stages: int) -> TimeModel:
    """Encoder passes far dearer than their FLOPs say, and a slow last stage."""
    coefficients = {
        llm_key(kind, s): (10**6 * (1 + 3 * (s == stages - 1)), 10**6, 0)
        for kind in "FB"
        for s in range(stages)
    }
    return TimeModel(
        1, coefficients | {"EF": (5 * 10**6, 10**8, 0, 10**8, 0), "EB": (10**7, 10**8, 0, 10**8, 0)}
    )


@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize("stages", [2, 4])
def test_times_move_actions_and_nothing_else(stages: int, zero_stage: int) -> None:
    plan = plan_of(stages, 2)
    plan = replace(plan, options=replace(plan.options, encoder_zero_stage=zero_stage))
    samples = random_samples(plan, 40, seed=stages)
    by_flops = build_step(plan, 3, samples)
    by_time = build_step(plan, 3, samples, times=slow_encoders(stages))
    validate_step(plan, by_time)
    for a, b in zip(by_flops.replicas, by_time.replicas, strict=True):
        assert a.micro_batches == b.micro_batches
        assert a.windows == b.windows
        assert a.transfers == b.transfers
    moved = False
    for rank in range(plan.mesh.world_size):
        before, after = by_flops.actions(rank), by_time.actions(rank)
        assert sorted(map(str, before)) == sorted(map(str, after))
        for kind in (Kind.F, Kind.B, Kind.EF, Kind.EB):
            order = [action.index for action in after if action.kind is kind]
            assert order == [action.index for action in before if action.kind is kind]
        moved |= before != after
    assert moved or zero_stage == 3
    assert (by_flops.hash != by_time.hash) == moved
