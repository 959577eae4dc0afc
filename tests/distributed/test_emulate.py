"""Emulated steps: the real executor and messages run what was planned, in its order, with its overlap."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from unit.plan_cases import plan_of, random_samples
from unit.test_plan_gangs import with_giant

from omni_ds.emulate.engines import EmulatedEncoders
from omni_ds.emulate.fork import RankFailure
from omni_ds.emulate.policies import encoders_first
from omni_ds.emulate.world import Case, Emulated, emulate
from omni_ds.plan.actions import COMPUTE, Kind
from omni_ds.plan.balance import rows_to_move
from omni_ds.plan.build import Plan, build_step
from omni_ds.plan.validate import validate_step

SECONDS = 1.0  # simulated length of the colocated step


@functools.cache
def cases() -> dict[str, Case]:
    """Two stages of two replicas: activations, features between ranks, and two reduction groups."""
    plan, inline = plan_of(2, 2), plan_of(2, 2, placement="first_stage")
    samples = random_samples(plan, 16, 3)
    step = build_step(plan, 0, samples)
    steps = {
        "colocated": (plan, step),
        "first_stage": (inline, build_step(inline, 0, samples)),
        "encoders_first": (plan, encoders_first(plan, step)),
        "levels": (with_levels(plan), step),
    }
    scale = int(SECONDS * 1e9 * 10**12 / Case(plan, step, 10**12).simulate().length)
    return {name: Case(*pair, scale) for name, pair in steps.items()}


def with_levels(plan: Plan) -> Plan:
    """Rows of the first encoder have a level for each layer of the first stage, and one more."""
    first, *others = plan.encoders
    return replace(plan, encoders=(replace(first, levels=plan.stages[0][1] + 1), *others))


@functools.cache
def emulated() -> dict[str, tuple[Emulated, ...]]:
    return emulate(cases(), timeout=90)


@pytest.mark.parametrize("name", ["colocated", "first_stage", "encoders_first", "levels"])
def test_ranks_run_what_was_planned(name: str) -> None:
    case, (run,) = cases()[name], emulated()[name]
    validate_step(case.plan, case.step)
    for rank, times in enumerate(run.times):
        assert tuple(action for action, _, _ in times) == case.step.actions(rank)


@pytest.mark.parametrize("name", ["colocated", "first_stage", "encoders_first"])
def test_time_is_the_simulated_one(name: str) -> None:
    """Never shorter, and well below doing all of it one after another, which is 2.5 to 4 times as long here:
    a loaded machine may take half as long again, ranks that do not overlap may not."""
    case, (run,) = cases()[name], emulated()[name]
    simulated = case.simulate().length
    one_by_one = sum(case.duration(rank, a) for rank in range(4) for a in case.step.actions(rank))
    assert one_by_one > 2 * simulated
    assert 0.999 * simulated < run.nanoseconds < 0.9 * one_by_one
    for rank, times in enumerate(run.times):
        for action, start, end in times:
            if action.kind in COMPUTE:
                assert end - start >= case.duration(rank, action), action


@pytest.mark.parametrize(("name", "levels", "left"), [("colocated", 0, 0), ("levels", 5, 1)])
def test_messages_have_the_real_size(name: str, levels: int, left: int) -> None:
    """left: levels that are added on the second stage."""
    case, (run,) = cases()[name], emulated()[name]
    assert (case.plan.levels, case.plan.levels_into(1)) == (levels, left)
    rows = 0
    for replica in case.step.replicas:
        media = [item.rows for mb in replica.micro_batches for s in mb.samples for item in s.items]
        rows += 2 * sum(mb.tokens for mb in replica.micro_batches)  # activations and their gradients
        rows += 2 * left * sum(media)
        rows += 2 * (1 + levels) * sum(t.rows for t in replica.transfers if not t.local)
    assert run.bytes_sent == rows * case.plan.llm.hidden * 4


def test_a_row_in_the_wrong_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases()["colocated"]
    assert any(a.kind is Kind.SEND_X for rank in range(4) for a in case.step.actions(rank))
    forward = EmulatedEncoders.forward

    def swapped(self, *args, **kwargs):
        return forward(self, *args, **kwargs).flip(0)

    monkeypatch.setattr(EmulatedEncoders, "forward", swapped)
    with pytest.raises(RankFailure, match="belong elsewhere"):
        emulate({"colocated": case}, timeout=60)


def test_lanes_and_slices_carry_the_right_rows() -> None:
    """Sequence and tensor ranks, and an image that a gang of them encodes."""
    plan = plan_of(1, 1, sequence=2, tensor=2, max_tokens_per_micro_batch=8192)
    step = build_step(plan, 0, with_giant(plan, 8))
    assert any(share.slices for window in step.replicas[0].windows for share in window.shares)
    (run,) = emulate({"lanes": Case(plan, step, 0)}, timeout=60)["lanes"]
    rows = 2 * rows_to_move(step)
    assert run.bytes_sent == rows * plan.llm.hidden * 4
