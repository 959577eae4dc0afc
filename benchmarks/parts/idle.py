"""Where the time of a measured step went, from the times of its actions and the plan's dependencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omni_ds.plan.actions import COLLECTIVES, COMPUTE, ENCODER_COMPUTE, LLM_COMPUTE, Action, Kind
from omni_ds.plan.build import Plan, StepPlan
from omni_ds.plan.predict import predict
from omni_ds.plan.simulate import CAUSES
from omni_ds.plan.times import TimeModel
from omni_ds.plan.validate import plan_graph

Times = Sequence[tuple[Action, int, int]]
# What a rank does or waits for. Waits for what another rank has not finished go by its name.
PARTS = ("llm", "encoders", "activations", "gradients", "features", "feature gradients", "other ranks")
PARTS += ("messages", "reduce", "update", "end of step")
BUSY = ("llm", "encoders", "update")
EXPOSED = ("messages", "reduce")  # communication that nothing hides, the host's work included


@dataclass(frozen=True)
class Measured:
    """One measured step. times: by rank, all actions in order, ns of one clock; compute: by rank, ns of
    compute actions without waiting."""

    times: Sequence[Times]
    compute: Sequence[Mapping[Action, int]]


@dataclass(frozen=True)
class Account:
    """parts: name in PARTS -> ns, summed over ranks. durations: (rank, action) -> ns of compute and
    collectives, waiting left out; length: ns of the step."""

    parts: Mapping[str, int]
    durations: Mapping[tuple[int, Action], int]
    length: int

    @property
    def shares(self) -> dict[str, float]:
        total = sum(self.parts.values()) or 1
        return {name: value / total for name, value in self.parts.items()}

    @property
    def idle(self) -> float:
        """Share of the ranks' time in which they neither compute nor update weights."""
        return sum(share for name, share in self.shares.items() if name not in BUSY)


def account(plan: Plan, step: StepPlan, measured: Measured) -> Account:
    """Divide all ranks' time from the first action of the step to its end.

    A gap before an action is a wait for whatever input of it was ready last ("activations", ...: their
    producer had not finished); what is left of the gap passes although all inputs were ready: transfer and
    host ("messages"). Of an action of several ranks, the time until the last of them entered is a wait for
    "other ranks".
    """
    graph = plan_graph(plan, step)
    at: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, times in enumerate(measured.times):
        assert tuple(action for action, _, _ in times) == step.actions(rank), f"rank {rank} ran another plan"
        for position, (action, start, end) in enumerate(times):
            if action.kind in COMPUTE:  # an empty micro-batch computes nothing
                start = end if action not in measured.compute[rank] else start
                end = start + measured.compute[rank].get(action, 0)
            at[rank, position] = start, end
    begin = min(times[0][1] for times in measured.times)
    finish = max(times[-1][2] for times in measured.times)
    parts, durations, done = dict.fromkeys(PARTS, 0), {}, [begin] * len(graph.needs)
    previous = dict.fromkeys(range(len(measured.times)), begin)
    blocking = {node for chain in graph.program.values() for node in chain}
    for node in graph.order():
        ready = max([done[earlier] for earlier, _ in graph.needs[node]], default=begin)
        if node not in blocking:
            done[node] = ready  # a message: both ends posted, and what it carries is made
            continue
        entered = max(at[member][0] for member in graph.members[node])
        done[node] = max(at[member][1] for member in graph.members[node])
        several = len(graph.members[node]) > 1  # then it also waits for what the others did before
        inputs = [
            (done[n], why) for n, why in graph.needs[node] if why in CAUSES and (several or why != "program")
        ]
        for rank, position in graph.members[node]:
            action, (start, end) = graph.programs[rank][position], at[rank, position]
            last, why = max(inputs, default=(begin, "program"))
            waited = min(start, max(last, previous[rank])) - previous[rank]
            parts[CAUSES[why]] += max(0, waited)
            parts["messages"] += start - previous[rank] - max(0, waited)
            together = min(end, max(start, entered)) - start
            parts["other ranks"] += together
            parts[_part(action)] += end - start - together
            durations[rank, action] = max(0, done[node] - entered)
            previous[rank] = end
    for last in previous.values():
        parts["end of step"] += finish - last
    return Account(parts, durations, finish - begin)


def _part(action: Action) -> str:
    if action.kind in LLM_COMPUTE:
        return "llm"
    if action.kind in ENCODER_COMPUTE:
        return "encoders"
    return "update" if action.kind in (Kind.STEP, Kind.NORM) else "reduce"


def replayed_ns(plan: Plan, step: StepPlan, found: Account) -> int:
    """Length of the step in the simulation with the measured times of its actions: with messages that take
    no time."""
    return predict(plan, step, time=lambda rank, action: found.durations.get((rank, action), 0)).length


def planned_ns(plan: Plan, step: StepPlan, model: TimeModel, ends: Mapping[tuple[int, Action], int]) -> int:
    """Length of the step as planned: compute as the model predicts it, collectives at the end as measured."""
    from omni_ds.engine.timing import observe

    def time(rank: int, action: Action) -> int:
        if action.kind in COLLECTIVES:
            return ends.get((rank, action), 0)
        asked = observe(plan, step, rank, action, 0)
        if action.kind in (Kind.EF, Kind.EB) and not any(asked.sizes):
            return 0
        return model.predict(asked.key, asked.sizes)

    return predict(plan, step, time=time).length
