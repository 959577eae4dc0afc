"""Measures actions in a few steps, fits the time model on rank 0, hands it to the planning of later steps."""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from data.shared_times import SharedTimes
from omni_ds.plan.actions import Action, Kind
from omni_ds.plan.build import Plan, StepPlan
from omni_ds.plan.times import Observation, TimeBook, TimeModel, fit, llm_key

# Bursts of measured steps, each later by a factor: early steps are not typical, later ones hardly change.
FIRST, LENGTH, FACTOR = 4, 4, 4
# For one fit, over all ranks.
MOST_OBSERVATIONS = 2000


def model_keys(plan: Plan) -> tuple[tuple[str, int], ...]:
    """Every key of a time model and its number of coefficients."""
    stages = range(plan.mesh.pipe)
    keys = [(llm_key(kind.value, stage), 3) for kind in (Kind.F, Kind.B) for stage in stages]
    if plan.encoders:
        keys += [(kind.value, 1 + 2 * len(plan.encoders)) for kind in (Kind.EF, Kind.EB)]
    return tuple(keys)


def observe(plan: Plan, step: StepPlan, rank: int, action: Action, nanoseconds: int) -> Observation:
    """A compute action of a rank, measured, with the sizes that its time depends on."""
    if action.kind in (Kind.F, Kind.B):
        lengths = step.replica_of(rank).micro_batches[action.index].lengths
        sizes = (sum(lengths), sum(n * n for n in lengths))
        return Observation(llm_key(action.kind.value, plan.mesh.coords(rank).pipe), sizes, nanoseconds)
    found = {meta.name: [0, 0] for meta in plan.encoders}
    for _, share in step.shares(rank, action.index):
        for placed in share.items:
            tokens, squares = placed.item.sizes
            found[placed.item.encoder][0] += tokens
            found[placed.item.encoder][1] += squares
    return Observation(
        action.kind.value, tuple(size for entry in found.values() for size in entry), nanoseconds
    )


class Timing:
    """The run's time models.

    Args:
        plan: the static plan.
        rank: global rank.
        group: CPU group of the world.
        horizon: steps that may already be planned when a model is published.
    """

    def __init__(self, plan: Plan, rank: int, group: ProcessGroup, horizon: int):
        self._plan, self._rank, self._group = plan, rank, group
        self._horizon = horizon
        self._observations: list[Observation] = []
        self.book = TimeBook()
        self.shared = SharedTimes(model_keys(plan))

    def wants(self, step: int) -> bool:
        """Whether actions of ``step`` (1 is the first) are measured."""
        start = FIRST
        while start <= step:
            if step < start + LENGTH:
                return True
            start *= FACTOR
        return False

    def add(self, step: int, plan: StepPlan, compute: Sequence[tuple[Action, int]]) -> TimeModel | None:
        """Add a measured step; at the end of a burst fit and publish. Collective in such a step.

        Windows with slices are left out: a gang waits for its slowest rank inside EF and EB.

        Args:
            compute: (action, nanoseconds) of this rank's compute actions, waiting left out.

        Returns:
            The new model, the same on every rank, or None.
        """
        self._observations += [
            observe(self._plan, plan, self._rank, action, ns)
            for action, ns in compute
            if action.kind in (Kind.F, Kind.B) or not self._in_gang(plan, action.index)
        ]
        if self.wants(step + 1):
            return None
        gathered: list = [None] * dist.get_world_size(self._group)
        dist.gather_object(
            self._observations, gathered if self._rank == 0 else None, dst=0, group=self._group
        )
        self._observations = []
        outcome: list[TimeModel | None] = [None]
        if self._rank == 0:
            rows = [observation for rows in gathered for observation in rows]
            model = fit(_thinned(rows), step + self._horizon + 1)
            outcome[0] = model if model.covers(key for key, _ in model_keys(self._plan)) else None
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        model = outcome[0]
        if model is not None:
            self.book.add(model)
            self.shared.publish(model)
        return model

    def _in_gang(self, plan: StepPlan, window: int) -> bool:
        return any(share.slices for _, share in plan.shares(self._rank, window))

    def state_dict(self) -> dict:
        return {"stages": [list(layers) for layers in self._plan.stages], "models": self.book.to_json()}

    def load_state_dict(self, state: dict) -> None:
        """Take over the models of a checkpoint; those of other stages or encoders say nothing here."""
        book = TimeBook.from_json(state["models"])
        keys = dict(model_keys(self._plan))
        same_layers = [tuple(layers) for layers in state["stages"]] == list(self._plan.stages)
        fits = all(
            {key: len(values) for key, values in model.coefficients.items()} == keys for model in book.models
        )
        if same_layers and fits:
            self.book = book
            for model in book.models:
                self.shared.publish(model)


def _thinned(rows: list[Observation]) -> list[Observation]:
    """At most a bounded number of observations, evenly taken, whatever the world size."""
    step = -(-len(rows) // MOST_OBSERVATIONS)
    return rows[::step] if step > 1 else rows
