"""Predicted times of a step: every action of every rank, from its own replica's costs."""

from __future__ import annotations

from collections.abc import Callable

from omni_ds.plan.actions import ENCODER_COMPUTE, LLM_COMPUTE, SENDS, Action, Kind
from omni_ds.plan.base import LLMWork
from omni_ds.plan.cost import EncoderCost, LLMCost, llm_work
from omni_ds.plan.plan import Plan, StepPlan, spans_of
from omni_ds.plan.shards import rows_inside
from omni_ds.plan.simulate import Links, Simulation, simulate
from omni_ds.plan.validate import plan_graph


class StepCosts:
    """Called with (rank, action): FLOPs of F, B, EF and EB, 0 for everything else.

    The schedule is made from averages over replicas; these are the costs of each one.
    """

    def __init__(self, plan: Plan, step_plan: StepPlan):
        self._plan, self._step = plan, step_plan
        self._llm = tuple(_llm(plan, step_plan, data) for data in range(len(step_plan.replicas)))
        self._encoder = EncoderCost(plan.encoders, plan.options.encoder_recompute)
        self._known: dict[tuple[int, Kind, int], int] = {}

    def __call__(self, rank: int, action: Action) -> int:
        if action.kind in ENCODER_COMPUTE:
            key = (rank, action.kind, action.index)
            if key not in self._known:
                self._known[key] = self._window(rank, action)
            return self._known[key]
        if action.kind not in LLM_COMPUTE:
            return 0
        coords = self._plan.mesh.coords(rank)
        work = self._llm[coords.data]
        assert action.kind in (Kind.F, Kind.B), f"{action}: the cost of a split backward is not known"
        return (work.forward if action.kind is Kind.F else work.backward)[coords.pipe][action.index]

    def _window(self, rank: int, action: Action) -> int:
        shares = self._step.shares(rank, action.index)
        half = 0 if action.kind is Kind.EF else 1
        return sum(self._encoder.both(placed.item)[half] for _, share in shares for placed in share.items)


def _llm(plan: Plan, step_plan: StepPlan, data: int) -> LLMWork:
    return llm_work(
        plan.llm,
        plan.stages,
        [LLMCost.of(plan.llm, step_plan.replicas[data].micro_batches)],
        recompute=plan.options.recompute,
        forward_only=step_plan.forward_only,
        lanes=plan.mesh.lanes,
    )


def message_rows(plan: Plan, step_plan: StepPlan) -> Callable[[int, Action], int]:
    """(rank, send action) -> rows of the message, each as wide as the LLM's hidden states: tokens of a shard
    with the levels of its feature rows that are still to be added, or feature rows with all levels."""
    features = {
        (t.window, t.source, t.destination): t.rows * (1 + plan.levels)
        for replica in step_plan.replicas
        for t in replica.transfers
    }

    def rows(rank: int, action: Action) -> int:
        assert action.kind in SENDS, action
        if action.kind is Kind.SEND_X:
            return features[action.index, rank, action.peer]
        if action.kind is Kind.SEND_G:  # back to where the features came from
            return features[action.index, action.peer, rank]
        where = step_plan.mesh.coords(rank)
        replica = step_plan.replicas[where.data]
        micro_batch = replica.micro_batches[action.index]
        start, stop = replica.bounds(micro_batch)[where.sequence : where.sequence + 2]
        levels = plan.levels_into(where.pipe + (action.kind is Kind.SEND_F))
        return stop - start + (levels and levels * rows_inside(spans_of(micro_batch), start, stop))

    return rows


def predict(
    plan: Plan,
    step_plan: StepPlan,
    *,
    time: Callable[[int, Action], int] | None = None,
    links: Links | None = None,
) -> Simulation:
    """Simulate the lowered step of all ranks.

    time: of an action on a rank; default its FLOPs (`StepCosts`), so that times are in FLOPs. links: of a
    message, in the same unit; default no time.
    """
    return simulate(
        plan_graph(plan, step_plan),
        time or StepCosts(plan, step_plan),
        links=links,
        rows=message_rows(plan, step_plan),
    )
