"""trace.png: the first traced step, planned above measured, on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omni_ds.plan.actions import COMPUTE, Action
from omni_ds.plan.plan import Plan, StepPlan
from omni_ds.plan.predict import predict
from omni_ds.show.gantt import Rows, Span, draw_figure

Times = Sequence[tuple[Action, int, int]]
MOST_ROWS = 32  # of larger worlds the first replica alone is drawn


def draw_trace(plan: Plan, step_plan: StepPlan, measured: Sequence[Times], path: Path, step: int) -> None:
    """Draw a step into a PNG file.

    Planned work is scaled so that all ranks' F, B, EF and EB together take the measured time: what differs is
    how long single actions took, and where ranks waited.

    Args:
        measured: by rank, (action, start, end) in ns of one clock; time waiting for messages left out.
        step: its number, for the title.

    Raises:
        OSError: the file cannot be written.
    """
    planned = predict(plan, step_plan)
    ranks = range(len(measured)) if len(measured) <= MOST_ROWS else plan.mesh.encoder_groups()[0]
    origin = min((start for times in measured for _, start, _ in times), default=0)
    actual = tuple(
        tuple((action, (start - origin) / 1e6, (end - origin) / 1e6) for action, start, end in measured[rank])
        for rank in ranks
    )
    expected = [planned.spans[rank] for rank in ranks]
    scale = _compute(actual) / (_compute(expected) or 1)
    scaled = tuple(
        tuple((action, start * scale, end * scale) for action, start, end in spans) for spans in expected
    )
    labels = tuple(f"rank {rank}\nstage {plan.mesh.coords(rank).pipe}" for rank in ranks)
    figure = draw_figure(
        [
            Rows(f"planned:  {planned.length * scale:.0f} ms,  {_idle(scaled):.1f} % idle", labels, scaled),
            Rows(f"measured:  {_length(actual):.0f} ms,  {_idle(actual):.1f} % idle", labels, actual),
        ],
        f"Step {step}: planned and measured",
        "ms; planned work scaled to the measured time of all compute, messages and the end of the step left "
        "out.  On the bars: number of the micro-batch, w and number of the window",
    )
    figure.savefig(path)


def _compute(rows: Sequence[Sequence[Span]]) -> float:
    return sum(end - start for row in rows for action, start, end in row if action.kind in COMPUTE)


def _length(rows: Sequence[Sequence[Span]]) -> float:
    return max((end for row in rows for _, _, end in row), default=0)


def _idle(rows: Sequence[Sequence[Span]]) -> float:
    """Percent of the ranks' time up to the last compute action that is not compute."""
    last = max((end for row in rows for a, _, end in row if a.kind in COMPUTE), default=0)
    return 100 * (1 - _compute(rows) / (last * len(rows))) if last else 0.0
