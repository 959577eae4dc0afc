"""Draw one planned step of a configuration, with encoders on every rank and on the first stage only.

    python docs/figures/joint_pipeline.py

writes docs/figures/joint_pipeline.png: the compute actions of the first replica as the plan's simulation
times them, on made-up samples (those of `run.py --plan`). Options choose another configuration or file.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from omni_ds.composition import plan_of, read_composition
from omni_ds.config.load import load_config
from omni_ds.config.resolve import resolve
from omni_ds.plan.actions import Kind
from omni_ds.plan.build import build_step
from omni_ds.plan.example import example_samples
from omni_ds.plan.plan import StepPlan

# Lightness falls from kind to kind, and encoder work is hatched: readable in grey, too.
STYLE = {
    Kind.F: ("#cfe3f5", None, "F: LLM forward of a micro-batch"),
    Kind.B: ("#5b8fc4", None, "B: LLM backward of a micro-batch"),
    Kind.EF: ("#fbe3b5", "///", "EF: encoder forward of a window"),
    Kind.EB: ("#d98a2b", "\\\\\\", "EB: encoder backward of a window"),
}
PLACEMENTS = {
    "colocated": "colocated: every rank encodes its share of every window",
    "first_stage": "first_stage: stage 0 encodes everything (baseline)",
}


def planned_steps(path: str, overrides: list[str], world: int) -> dict[str, StepPlan]:
    """Placement -> plan of the same step."""
    steps = {}
    for placement in PLACEMENTS:
        config = load_config(path, [*overrides, f"omni.encoder_parallel.placement={placement}"])
        config = resolve(config, world, None)
        plan = plan_of(config, read_composition(config, processors=False), world)
        samples = example_samples(plan, config.train_batch_size, config.omni.data.max_length)
        steps[placement] = build_step(plan, 0, samples)
    return steps


def draw(steps: dict[str, StepPlan], output: Path) -> None:
    """One panel a placement, all on one time axis in units of a mean LLM forward of a stage."""
    figure, axes = plt.subplots(len(steps), 1, sharex=True, figsize=(13, 5.2), layout="constrained")
    unit = mean_forward(next(iter(steps.values())))
    for axis, (placement, step) in zip(axes, steps.items(), strict=True):
        schedule = step.replicas[0].schedule
        for stage, (actions, times) in enumerate(zip(schedule.stages, schedule.times, strict=True)):
            for action, (start, end) in zip(actions, times, strict=True):
                if end <= start:
                    continue
                color, hatch, _ = STYLE[action.kind]
                left, width = start / unit, (end - start) / unit
                axis.barh(
                    stage, width, left=left, height=0.86, color=color, hatch=hatch, edgecolor="black", lw=0.4
                )
                encodes = action.kind in (Kind.EF, Kind.EB)
                if width > (2 if encodes else 0.9):
                    box = {"facecolor": color, "edgecolor": "none", "pad": 0.8} if encodes else None
                    axis.text(
                        left + width / 2,
                        stage,
                        str(action) if encodes else str(action.index),
                        ha="center",
                        va="center",
                        fontsize=6.5,
                        bbox=box,
                    )
        axis.set_yticks(range(len(schedule.stages)), [f"stage {s}" for s in range(len(schedule.stages))])
        axis.invert_yaxis()
        axis.set_title(
            f"{PLACEMENTS[placement]}; {schedule.length / unit:.0f} units, "
            f"bubbles {100 * step.bubble_fraction:.0f} %",
            loc="left",
            fontsize=10,
        )
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlim(0)
    axes[-1].margins(x=0.01)
    axes[-1].set_xlabel("simulated time, 1 = mean forward of a stage for a micro-batch")
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor="black", label=label)
        for color, hatch, label in STYLE.values()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.savefig(output, dpi=110)


def mean_forward(step: StepPlan) -> float:
    schedule = step.replicas[0].schedule
    lengths = [
        end - start
        for actions, times in zip(schedule.stages, schedule.times, strict=True)
        for action, (start, end) in zip(actions, times, strict=True)
        if action.kind is Kind.F and end > start
    ]
    return sum(lengths) / len(lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="ds_configs/omni.json")
    parser.add_argument("--set", action="append", default=["pipeline.stages=4", "train_batch_size=64"])
    parser.add_argument("--world_size", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".png"))
    arguments = parser.parse_args()
    draw(planned_steps(arguments.config, arguments.set, arguments.world_size), arguments.output)


if __name__ == "__main__":
    main()
