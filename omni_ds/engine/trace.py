"""What really happened in a step: one timeline of all ranks, for Perfetto or chrome://tracing."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed import ProcessGroup

from omni_ds.plan.actions import ENCODER_COMPUTE, LLM_COMPUTE, Action
from omni_ds.plan.build import Plan, StepPlan

Times = Sequence[tuple[Action, int, int]]


class Tracer:
    """Collects the action times of chosen steps and writes ``trace.json`` and ``trace.png`` on rank 0.

    Times are relative to the moment after the ranks agreed on the step, the same moment on all of them up
    to the latency of one small message, so ranks of several nodes share one axis.

    Args:
        path: the file; rewritten after every traced step, so that a killed run leaves a complete one.
        steps: steps to trace (1 is the first).
        group: CPU group of the world.
    """

    def __init__(self, path: Path, steps: range, group: ProcessGroup):
        self._path, self._steps, self._group = path, steps, group
        self._rank = dist.get_rank(group)
        self._events: list[dict] = []
        self._offset_us = 0.0
        self._first: tuple[StepPlan, int, list[Times]] | None = None

    def wants(self, step: int) -> bool:
        return step in self._steps

    def add(self, step: int, plan: StepPlan, times: Times, origin_ns: int) -> None:
        """Add one step; collective. ``times``: (action, start, end) in ns of this rank's monotonic clock."""
        mine = [(str(a), _category(a), start - origin_ns, end - origin_ns) for a, start, end in times]
        gathered: list = [None] * dist.get_world_size(self._group)
        dist.gather_object(mine, gathered if self._rank == 0 else None, dst=0, group=self._group)
        if self._rank != 0:
            return
        if self._first is None:
            measured = [[(Action.parse(a), start, end) for a, _, start, end in each] for each in gathered]
            self._first = (plan, step, measured)
        longest = 0.0
        for rank, actions in enumerate(gathered):
            for name, category, start, end in actions:
                longest = max(longest, end / 1e3)
                self._events.append(
                    {
                        "name": name,
                        "cat": category,
                        "ph": "X",
                        "pid": rank,
                        "tid": 0,
                        "ts": self._offset_us + start / 1e3,
                        "dur": (end - start) / 1e3,
                        "args": {"step": step},
                    }
                )
        self._offset_us += longest
        names = [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
            for rank in range(len(gathered))
        ]
        self._path.write_text(json.dumps({"traceEvents": names + self._events, "displayTimeUnit": "ms"}))

    def draw(self, plan: Plan) -> Path | None:
        """Draw the first traced step, planned above measured, beside the timeline (rank 0, if there is one).

        Raises:
            OSError: the picture cannot be written.
        """
        if self._first is None:
            return None
        from omni_ds.show.trace_picture import draw_trace  # imports matplotlib

        step_plan, step, measured = self._first
        path = self._path.with_suffix(".png")
        draw_trace(plan, step_plan, measured, path, step)
        return path


def _category(action: Action) -> str:
    if action.kind in LLM_COMPUTE:
        return "llm"
    return "encoder" if action.kind in ENCODER_COMPUTE else "communication"
