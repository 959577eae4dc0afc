"""Benchmarks: where a measured step's time went; and the baseline that leaves bubbles empty."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.plan_cases import plan_of, random_samples

from benchmarks.parts.idle import Measured, account, replayed_ns
from omni_ds.plan.actions import COMPUTE, ENCODER_COMPUTE, LLM_COMPUTE, Action
from omni_ds.plan.build import Plan, StepPlan, build_step
from omni_ds.plan.predict import StepCosts, predict
from omni_ds.plan.simulate import CAUSES, Links, Simulation
from omni_ds.plan.validate import validate_step

END = 10**6


def _simulated(plan: Plan, step: StepPlan, links: Links | None = None) -> Simulation:
    costs = StepCosts(plan, step)

    def time(rank: int, action: Action) -> int:
        return costs(rank, action) if action.kind in COMPUTE else END

    return predict(plan, step, time=time, links=links)


def _measured(simulation: Simulation) -> Measured:
    ranks = range(len(simulation.times))
    compute = [{a: e - s for a, s, e in simulation.times[r] if a.kind in COMPUTE} for r in ranks]
    return Measured([simulation.spans[r] for r in ranks], compute)


@pytest.mark.parametrize("placement", ["colocated", "first_stage"])
@pytest.mark.parametrize("shape", [(2, 1), (4, 2)])
def test_account_of_a_simulated_step_is_the_simulation(shape: tuple[int, int], placement: str) -> None:
    plan = plan_of(*shape, placement=placement)
    step = build_step(plan, 0, random_samples(plan, 16, 3))
    simulation = _simulated(plan, step)
    found = account(plan, step, _measured(simulation))
    world = plan.mesh.world_size
    assert found.length == simulation.length == replayed_ns(plan, step, found)
    assert sum(found.parts.values()) == world * simulation.length
    assert found.parts["messages"] == 0
    for kinds, part in ((LLM_COMPUTE, "llm"), (ENCODER_COMPUTE, "encoders")):
        spent = sum(e - s for times in simulation.times.values() for a, s, e in times if a.kind in kinds)
        assert found.parts[part] == spent
    for cause in ("activations", "gradients", "features", "feature gradients", "end of step"):
        # A wait for others that enter a collective late begins inside the action when it is measured.
        waited = sum(causes.get(cause, 0) for causes in simulation.idle.values())
        assert found.parts[cause] == waited, cause


def test_messages_that_take_time_are_exposed() -> None:
    """A gap is a wait for the producer up to its end and exposed communication after it."""
    plan = plan_of(2, 1)
    step = build_step(plan, 0, random_samples(plan, 8, 1))
    instant, slow = _simulated(plan, step), _simulated(plan, step, Links(latency=1000))
    found = account(plan, step, _measured(slow))
    idle = sum(sum(causes.values()) for causes in slow.idle.values())
    waits = sum(found.parts[name] for name in (*CAUSES.values(), "messages"))
    assert waits == idle
    assert 0 < found.parts["messages"] < 1000 * sum(map(len, slow.times.values()))
    assert replayed_ns(plan, step, found) == instant.length < slow.length


def test_bubbles_left_empty() -> None:
    """All stages encode at the same point; the step is legal and takes longer."""
    plan = plan_of(4, 1)
    samples = random_samples(plan, 32, 5)
    ours = build_step(plan, 0, samples)
    plain = replace(plan, options=replace(plan.options, fill_bubbles=False))
    step = build_step(plain, 0, samples)
    validate_step(plain, step)
    encoding = [
        [str(action) for action in stage if action.kind in ENCODER_COMPUTE]
        for stage in step.replicas[0].schedule.stages
    ]
    assert encoding[0] and all(stage == encoding[0] for stage in encoding)
    assert predict(plain, step).length > predict(plan, ours).length
