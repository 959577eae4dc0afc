"""Plans as text: the mesh, what each rank holds, and the actions of one step as grids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from omni_ds.plan.actions import Action, Kind
from omni_ds.plan.activations import Load
from omni_ds.plan.balance import feature_bytes_bound
from omni_ds.plan.memory import BF16, Numerics
from omni_ds.plan.memory_table import memory_table

if TYPE_CHECKING:
    from omni_ds.plan.fill import Schedule
    from omni_ds.plan.plan import Plan, StepPlan

LINE = 160
_SHORT = {Kind.F: "f", Kind.B: "b", Kind.I: "i", Kind.W: "w", Kind.EF: "e", Kind.EB: "E"}


def order_grid(
    programs: Mapping[int, Sequence[Action]], *, mark: tuple[int, int] | None = None, around: int = 8
) -> str:
    """Rank x order of actions, wrapped. mark: (rank, position) printed as >cell<, with `around` columns
    either side."""
    longest = max((len(actions) for actions in programs.values()), default=0)
    first, stop = 0, longest
    if mark is not None:
        first, stop = max(0, mark[1] - around), min(longest, mark[1] + around + 1)
    rows = {}
    for rank, actions in programs.items():
        cells = [str(action) for action in actions[first:stop]]
        if mark is not None and mark[0] == rank and mark[1] - first < len(cells):
            cells[mark[1] - first] = f">{cells[mark[1] - first]}<"
        rows[rank] = cells
    width = max((len(cell) for cells in rows.values() for cell in cells), default=1) + 1
    label = len(f"rank {max(rows, default=0)}")
    columns = max(1, (LINE - label - 3) // width)
    blocks = []
    for start in range(0, max(1, stop - first), columns):
        header = (
            " " * label
            + " | "
            + "".join(str(first + start + i).ljust(width) for i in range(min(columns, stop - first - start)))
        )
        lines = [header.rstrip()]
        for rank, cells in rows.items():
            text = "".join(cell.ljust(width) for cell in cells[start : start + columns])
            lines.append((f"rank {rank}".ljust(label) + " | " + text).rstrip())
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def time_grid(schedule: Schedule, labels: Sequence[str], *, cell: int = 5) -> str:
    """Stage x time, to scale; '.' is idle.

    cell: columns of an average LLM forward. Where its name does not fit an action shows f, b, e (EF) or E
    (EB); one of less than a column is not shown.
    """
    forwards = [
        end - start
        for actions, times in zip(schedule.stages, schedule.times, strict=True)
        for action, (start, end) in zip(actions, times, strict=True)
        if action.kind is Kind.F and end > start
    ]
    unit = max(1, sum(forwards) // max(1, len(forwards)) // cell)
    width = -(-schedule.length // unit)
    label = max((len(text) for text in labels), default=0)
    rows = []
    for actions, times in zip(schedule.stages, schedule.times, strict=True):
        row = ["."] * width
        for action, (start, end) in zip(actions, times, strict=True):
            left, right = start // unit, end // unit
            name = str(action)
            size = right - left
            if size <= 0:
                continue
            text = name if len(name) <= size else _SHORT[action.kind] * size
            row[left:right] = list(text.ljust(size, "-"))
        rows.append("".join(row))
    columns = LINE - label - 3
    blocks = []
    for start in range(0, max(1, width), columns):
        blocks.append(
            "\n".join(
                f"{text.ljust(label)} | {row[start : start + columns]}".rstrip()
                for text, row in zip(labels, rows, strict=True)
            )
        )
    return "\n\n".join(blocks)


def format_plan(plan: Plan, step_plan: StepPlan, numerics: Numerics = BF16) -> str:
    """What `--plan` prints: mesh, placement, memory by stage, and one step of the first replica."""
    mesh, replica = plan.mesh, step_plan.replicas[0]
    schedule = replica.schedule
    lanes = len(replica.ranks) // len(schedule.stages)
    labels = [
        f"stage {s} rank {replica.ranks[s * lanes]}"
        + (f"-{replica.ranks[s * lanes + lanes - 1]}" if lanes > 1 else "")
        for s in range(mesh.pipe)
    ]
    sections = [
        f"Mesh: {mesh.world_size} ranks = pipe {mesh.pipe} x data {mesh.data} x sequence {mesh.sequence} "
        f"x tensor {mesh.tensor}",
        "\n".join(f"  replica {d}: ranks {_ranks(group)}" for d, group in enumerate(mesh.encoder_groups())),
        _placement(plan),
        memory_table(plan, Load.of(step_plan), numerics),
        _step(plan, step_plan, numerics),
        "One step of replica 0, compute to scale (F, B: micro-batch; EF, EB: encoder window; '.': idle)",
        time_grid(schedule, labels),
        "One step of replica 0, every action in order (S, R: send, receive; "
        "F, B, X, G: activations, their gradients, features, their gradients)",
        order_grid({rank: step_plan.actions(rank) for rank in replica.ranks}),
    ]
    return "\n\n".join(sections)


def _ranks(group: Sequence[int]) -> str:
    return ", ".join(map(str, group)) if len(group) <= 16 else f"{group[0]}, {group[1]}, ... {group[-1]}"


def _placement(plan: Plan) -> str:
    lines = ["Placement"]
    for s, (start, stop) in enumerate(plan.stages):
        parts = [f"decoder layers {start}-{stop - 1}" if stop > start + 1 else f"decoder layer {start}"]
        if s == 0:
            parts.insert(0, "embedding")
        if s == plan.mesh.pipe - 1:
            parts.append("norm and head" + (" (tied)" if plan.llm.tied else ""))
        lines.append(f"  stage {s}: {', '.join(parts)}")
    where, shared = ("the first stage", "its ranks") if plan.first_stage_only else ("every rank", "the world")
    if plan.options.placement == "first_stage" and not plan.first_stage_only and plan.mesh.pipe > 1:
        where = "every rank's shard, run for the first stage"
    for meta in plan.encoders:
        parts = (("tower", meta.tower_trainable), ("projector", meta.projector_trainable))
        trains = [name for name, trainable in parts if trainable]
        lines.append(
            f"  encoder {meta.name} ({meta.model_type}): {where}, ZeRO-{plan.options.encoder_zero_stage} "
            f"over {shared}, trains {' and '.join(trains) or 'nothing'}"
        )
    return "\n".join(lines)


def _step(plan: Plan, step_plan: StepPlan, numerics: Numerics) -> str:
    windows = step_plan.replicas[0].windows
    items = sum(len(share.items) for r in step_plan.replicas for w in r.windows for share in w.shares)
    rows = sum(t.rows for r in step_plan.replicas for t in r.transfers)
    moved = sum(t.rows for r in step_plan.replicas for t in r.transfers if not t.local)
    least = feature_bytes_bound(step_plan, plan.row_width, numerics.element)
    return "\n".join(
        (
            f"Step {step_plan.step}: {step_plan.samples} samples, {step_plan.tokens} tokens "
            f"({step_plan.target_tokens} targets), {items} media",
            f"  {step_plan.micro_batches} micro-batches a replica, {len(windows)} encoder windows"
            + (f" of up to {len(windows[0].micro_batches)} micro-batches" if windows else "")
            + f", at most {step_plan.replicas[0].live} alive",
            f"  {rows} feature rows, {moved} of them travel between ranks: at least {least} bytes of "
            "features and gradients",
            f"  imbalance: LLM {step_plan.llm_imbalance:.3f} (without balancing "
            f"{step_plan.llm_imbalance_given:.3f}), encoders {step_plan.encoder_imbalance:.3f} "
            f"({step_plan.encoder_imbalance_given:.3f}); "
            f"{100 * step_plan.long_items:.1f} % of media in parts",
            f"  bubbles {100 * step_plan.bubble_fraction:.1f} % of the simulated step",
            f"  plan hash {step_plan.hash:016x}",
        )
    )
