"""The plan's actions as DeepSpeed pipeline instructions."""

from collections.abc import Iterator, Sequence

from deepspeed.runtime.pipe.schedule import PipeInstruction, PipeSchedule

from omni_ds.plan.actions import Action, Kind

# DeepSpeed's engine looks an instruction's handler up by its exact class, so each kind has one.
INSTRUCTIONS: dict[Kind, type[PipeInstruction]] = {
    kind: type(f"Planned{kind.name}", (PipeInstruction,), {"__doc__": f"Run a planned {kind.name} action."})
    for kind in Kind
}


class PlannedSchedule(PipeSchedule):
    """Yields one rank's planned actions, one instruction a step, in the planned order."""

    def __init__(self, actions: Sequence[Action], micro_batches: int, stages: int, stage_id: int):
        super().__init__(micro_batches=micro_batches, stages=stages, stage_id=stage_id)
        self._actions = actions

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for action in self._actions:
            yield [INSTRUCTIONS[action.kind](action=action)]

    def num_pipe_buffers(self) -> int:
        return 0  # activations are kept by micro-batch in the executor, not in the engine's ring of buffers
