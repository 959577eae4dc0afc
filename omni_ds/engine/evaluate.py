"""Evaluation: a forward-only step plan through the same handlers. It changes no weight and no state."""

from collections.abc import Iterable, Mapping

import torch
from torch.distributed import ProcessGroup

from omni_ds.engine.executor import StepExecutor, StepInput
from omni_ds.engine.llm_engine import sum_over_ranks
from omni_ds.plan.build import Plan

_COLUMNS = ("loss", "target_tokens", "exact", "samples")


def evaluate(
    steps: Iterable[StepInput],
    tasks: tuple[str, ...],
    executor: StepExecutor,
    plan: Plan,
    rank: int,
    group: ProcessGroup,
) -> dict:
    """Loss and exact match of one evaluation set; collective, the same result on every rank.

    Exact match is by teacher forcing: greedy decoding yields the reference exactly when every target token,
    end of turn included, is the argmax given the tokens before it.

    Args:
        steps: the set's forward-only steps.
        tasks: every task name that occurs in the set, in the same order on all ranks.

    Returns:
        ``{"loss", "exact_match", "samples", "tasks": {task: the same}}``; a sample whose medium failed
        counts as a wrong answer.
    """
    counted = _counts_here(plan, rank)
    totals = {task: [0.0] * len(_COLUMNS) for task in tasks}
    for step in steps:
        result = executor.run(step)
        for index, scores in result.scores.items() if counted else ():
            micro_batch = step.plan.replica_of(rank).micro_batches[index]
            owner = step.batches[index].sample_of_target
            loss = torch.zeros(len(micro_batch.samples), dtype=torch.float64, device=owner.device)
            right = torch.zeros_like(loss)
            loss.index_add_(0, owner, scores.loss.double())
            right.index_add_(0, owner, scores.correct.double())
            targets = torch.bincount(owner, minlength=len(micro_batch.samples))
            rows = zip(micro_batch.samples, loss.tolist(), right.tolist(), targets.tolist(), strict=True)
            for sample, sample_loss, sample_right, sample_targets in rows:
                total = totals[sample.task]
                total[0] += sample_loss
                total[1] += sample_targets
                total[2] += float(sample_targets > 0 and sample_right == sample_targets)
                total[3] += 1
    flat = sum_over_ranks([value for task in tasks for value in totals[task]], group)
    width = len(_COLUMNS)
    summed = {task: flat[i * width : (i + 1) * width] for i, task in enumerate(tasks)}
    whole = [sum(column) for column in zip(*summed.values(), strict=True)] or [0.0] * width
    report = _report(whole)
    if len(tasks) > 1:
        report["tasks"] = {task or "other": _report(values) for task, values in summed.items()}
    return report


def _counts_here(plan: Plan, rank: int) -> bool:
    """Scores exist on the last stage; one tensor-parallel rank of it counts them."""
    where = plan.mesh.coords(rank)
    return where.pipe == plan.mesh.pipe - 1 and where.tensor == 0 and where.sequence == 0


def _report(values: list[float]) -> dict:
    loss, targets, exact, samples = values
    return {
        "loss": loss / max(targets, 1.0),
        "exact_match": exact / max(samples, 1.0),
        "samples": int(samples),
    }


def flatten(results: Mapping[str, dict]) -> dict[str, float]:
    """``set/exact_match`` and ``set/task/exact_match`` scalars for the monitors."""
    scalars: dict[str, float] = {}
    for name, report in results.items():
        for task, values in {"": report, **report.get("tasks", {})}.items():
            prefix = f"{name}/{task}" if task else name
            scalars |= {f"{prefix}/{key}": values[key] for key in ("loss", "exact_match")}
    return scalars
