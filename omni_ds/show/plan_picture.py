"""plan.png: the planned steps of several modality mixes below each other, on one time scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from omni_ds.plan.plan import Plan, ReplicaPlan
from omni_ds.show.gantt import Rows, Span, draw_figure
from omni_ds.show.plan_record import Planned

_PREFIXES = ((10**15, "PFLOP"), (10**12, "TFLOP"), (10**9, "GFLOP"), (10**6, "MFLOP"))


def draw_plan(
    plan: Plan, steps: Mapping[str, Planned], path: Path, *, replicas: Sequence[int] = (0,)
) -> None:
    """Draw the steps, by name of the mix, into a PNG file.

    Args:
        replicas: data indices of the DP replicas to show, a row for each of their ranks.

    Raises:
        OSError: the file cannot be written.
    """
    longest = max((planned.simulation.length for planned in steps.values()), default=0)
    divisor, unit = next(((d, u) for d, u in _PREFIXES if longest >= d), (1, "FLOP"))
    ranks = [rank for data in replicas for rank in plan.mesh.encoder_groups()[data]]
    panels = [
        Rows(
            _title(name, planned, ranks),
            tuple(_label(plan, rank) for rank in ranks),
            tuple(_scaled(planned.simulation.spans[rank], divisor) for rank in ranks),
        )
        for name, planned in steps.items()
    ]
    figure = draw_figure(
        panels,
        _heading(plan, replicas),
        f"planned work of a rank one after another, {unit} (divide by the speed of the device for seconds; "
        "messages take no time here).  On the bars: number of the micro-batch, w and number of the window",
    )
    figure.savefig(path)


def _heading(plan: Plan, replicas: Sequence[int]) -> str:
    mesh = plan.mesh
    text = f"One planned step on {mesh.world_size} ranks: {mesh.pipe} pipeline stages"
    if mesh.data > 1:
        shown = ", ".join(map(str, replicas))
        text += f" x {mesh.data} replicas (replica {shown} shown)"
    encoders = ", ".join(meta.name for meta in plan.encoders) or "none"
    return f"{text}; encoders: {encoders}, {plan.options.placement}"


def _label(plan: Plan, rank: int) -> str:
    return f"rank {rank}\nstage {plan.mesh.coords(rank).pipe}"


def _scaled(spans: Sequence[Span], divisor: int) -> tuple[Span, ...]:
    return tuple((action, start / divisor, end / divisor) for action, start, end in spans)


def _title(name: str, planned: Planned, ranks: Sequence[int]) -> str:
    step, simulation = planned.step, planned.simulation
    idle = sum(sum(simulation.idle[rank].values()) for rank in ranks)
    total = len(ranks) * simulation.length
    parts = [
        f"{step.micro_batches} micro-batches",
        _windows(step.replicas[0]),
        f"{100 * idle / total if total else 0:.1f} % of the time idle",
    ]
    return f"{name}:  " + ",  ".join(part for part in parts if part)


def _windows(replica: ReplicaPlan) -> str:
    windows = [window for window in replica.windows if not window.empty]
    if not windows:
        return "no media"
    size = max(len(window.micro_batches) for window in windows)
    return f"{len(windows)} encoder windows of up to {size} micro-batch{'es' if size > 1 else ''}"
