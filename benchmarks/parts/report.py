"""Tables and pictures of benchmarks/multi_gpu.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.parts.cases import Entry
from benchmarks.parts.idle import BUSY, EXPOSED, PARTS
from omni_ds.show.plan_picture import draw_plan
from omni_ds.show.plan_record import Planned
from omni_ds.show.trace_picture import draw_trace

GOALS = {"image:text 3:7": 1.25, "image:text 9:1": 2.0}  # ours over first_stage, four stages
CLOSE = 0.1  # planned against measured step time


def text(rows: Sequence[dict], faults: Sequence[str], heading: str, command: str) -> str:
    """The report in Markdown."""
    lines = ["# Joint pipeline on several ranks", "", heading, "", f"`{command}`", ""]
    for model, layout in dict.fromkeys((row["model"], row["layout"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["layout"]) == (model, layout)]
        lines += [f"## {model}, {layout}", "", *_speed(mine), "", *_time(mine), ""]
    lines += ["## What it says", "", *_goals(rows), *_planning(rows), *_exposed(rows)]
    agree = f"- loss and gradient norm of all {len(rows)} cases agree by workload"
    return "\n".join([*lines, *([f"- DIFFERENT: {fault}" for fault in faults] or [agree])])


def _table(titles: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(titles) + " |",
        "|" + "---|" * len(titles),
        *("| " + " | ".join(cells) + " |" for cells in body),
    ]


def _speed(rows: Sequence[dict]) -> list[str]:
    """spread: (largest - smallest) / median of the repetitions. ours is faster by: ratio of medians
    (smallest - largest of the repetitions)."""
    titles = (
        "workload",
        "variant",
        "layers",
        "micro-batches",
        "tokens/s",
        "spread",
        "ours is faster by",
        "MFU",
    )
    titles += ("planned / measured", "peak GiB", "predicted", "MB sent", "of it features", "loss")
    return _table(
        titles,
        (
            (
                row["workload"],
                row["variant"],
                "+".join(map(str, row["stages"])),
                str(row["micro_batches"]),
                f"{row['tokens_per_second']:.0f}",
                f"{row['spread']:.1%}",
                _gain(rows, row),
                f"{row['mfu']:.1%}",
                f"{row['planned_seconds'] / row['seconds']:.3f}",
                f"{row['peak_gib']:.1f}",
                f"{row['predicted_gib']:.1f}",
                f"{row['megabytes_sent']:.1f}",
                f"{row['feature_megabytes']:.1f}",
                f"{row['loss']:.5f}",
            )
            for row in _by_workload(rows)
        ),
    )


def _time(rows: Sequence[dict]) -> list[str]:
    """Shares of all ranks' time in the measured step."""
    return _table(
        ("workload", "variant", *PARTS, "idle", "replayed / measured"),
        (
            (
                row["workload"],
                row["variant"],
                *(f"{row['shares'][part]:.1%}" for part in PARTS),
                f"{row['idle']:.1%}",
                f"{row['replayed_seconds'] / row['measured_step_seconds']:.3f}",
            )
            for row in _by_workload(rows)
        ),
    )


def _by_workload(rows: Sequence[dict]) -> list[dict]:
    order = list(dict.fromkeys(row["workload"] for row in rows))
    return sorted(rows, key=lambda row: order.index(row["workload"]))


def _gain(rows: Sequence[dict], row: dict) -> str:
    ours = _ours(rows, row)
    if ours is None or ours is row:
        return ""
    gains = sorted(b / a for a, b in zip(ours["seconds_all"], row["seconds_all"], strict=True))
    return f"{row['seconds'] / ours['seconds']:.3f} ({gains[0]:.3f} - {gains[-1]:.3f})"


def _ours(rows: Sequence[dict], row: dict) -> dict | None:
    keys = ("model", "layout", "workload")
    return next(
        (r for r in rows if r["variant"] == "ours" and all(r[k] == row[k] for k in keys)),
        None,
    )


def _goals(rows: Sequence[dict]) -> list[str]:
    found = []
    for row in rows:
        ours, goal = _ours(rows, row), GOALS.get(row["workload"])
        if row["layout"] == "pp4" and row["variant"] == "first_stage" and ours and goal:
            gain = row["seconds"] / ours["seconds"]
            found.append(
                f"- {row['model']}, pp4, {row['workload']}: ours over first_stage {gain:.2f} "
                f"(wanted {goal}: {'reached' if gain >= goal else 'not reached'})"
            )
    return found or ["- ours over first_stage on pp4: not in this run"]


def _planning(rows: Sequence[dict]) -> list[str]:
    ours = [row for row in rows if row["variant"] == "ours"]
    ratios = sorted(row["planned_seconds"] / row["seconds"] for row in ours)
    close = sum(abs(ratio - 1) <= CLOSE for ratio in ratios)
    if not ratios:
        return []
    return [
        f"- planned over measured step time of ours: {ratios[0]:.3f} to {ratios[-1]:.3f}; within "
        f"{CLOSE:.0%}: {close} of {len(ratios)}"
    ]


def _exposed(rows: Sequence[dict]) -> list[str]:
    """Of ours, by layout: communication that nothing hides, and the largest wait for another rank's work."""
    found = []
    for model, layout in dict.fromkeys((row["model"], row["layout"]) for row in rows):
        ours = [r for r in rows if (r["model"], r["layout"], r["variant"]) == (model, layout, "ours")]
        if ours:
            worst = {part: max(row["shares"][part] for row in ours) for part in PARTS if part not in BUSY}
            exposed = ", ".join(f"{part} {worst.pop(part):.1%}" for part in EXPOSED)
            wait = max(worst, key=lambda part: worst[part])
            found.append(
                f"- {model}, {layout}: exposed communication of ours, at most: {exposed}; largest wait: "
                f"{wait} {worst[wait]:.1%}"
            )
    return found


def differences(rows: Sequence[dict], tolerance: float) -> list[str]:
    """Losses and gradient norms that differ between cases of one workload, relative to the first of them."""
    first: dict[tuple, dict] = {}
    found = []
    for row in rows:
        reference = first.setdefault((row["model"], row["workload"]), row)
        for what in ("loss", "norm"):
            wanted = reference[f"{what}_range"][0]
            worst = max(row[f"{what}_range"], key=lambda value: abs(value - wanted))
            if not abs(worst - wanted) <= tolerance * abs(wanted):
                found.append(
                    f"{what} of {row['model']} {row['layout']} {row['variant']} {row['workload']}: {worst}, "
                    f"of {reference['layout']} {reference['variant']}: {wanted}"
                )
    return found


def draw(folder: Path, entries: Sequence[Entry]) -> None:
    """plan.png: ours with all workloads; trace.png: one step with most images, both of the layout with most
    stages."""
    ours = [entry for entry in entries if entry.case.variant == "ours"] or list(entries)
    stages = max(entry.case.plan.mesh.pipe for entry in ours)
    chosen = next(entry.case for entry in ours if entry.case.plan.mesh.pipe == stages)
    same = [e for e in ours if (e.case.model, e.case.layout) == (chosen.model, chosen.layout)]
    plan = chosen.plan
    draw_plan(plan, {e.case.workload: Planned.of(plan, e.step) for e in same}, folder / "plan.png")
    traced = next((e for e in same if e.case.workload == "image:text 9:1"), same[-1])
    draw_trace(plan, traced.step, traced.measured.times, folder / "trace.png", 1)
