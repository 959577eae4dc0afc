"""Evaluation: a forward-only step plan through the same handlers. It changes no weight and no state."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from models.packed import PackedBatch
from omni_ds.engine.executor import StepExecutor
from omni_ds.engine.llm_engine import sum_over_ranks
from omni_ds.engine.loss import TargetScores
from omni_ds.engine.step import StepInput
from omni_ds.plan.build import Plan

_COLUMNS = ("loss", "target_tokens", "exact", "samples")


def evaluate(
    steps: Iterable[StepInput],
    tasks: tuple[str, ...],
    executor: StepExecutor,
    plan: Plan,
    rank: int,
    group: ProcessGroup,
    sequence_group: ProcessGroup | None = None,
) -> dict:
    """Loss and exact match of one evaluation set; collective, the same result on every rank.

    Exact match is by teacher forcing: greedy decoding yields the reference exactly when every target token,
    end of turn included, is the argmax given the tokens before it.

    Args:
        steps: the set's forward-only steps.
        group: of the world, on CPU.
        sequence_group: ranks that hold shards of one sequence; None without sequence parallelism.
        tasks: every task name that occurs in the set, in the same order on all ranks.

    Returns:
        ``{"loss", "exact_match", "samples", "tasks": {task: the same}}``; a sample whose medium failed
        counts as a wrong answer.
    """
    where = plan.mesh.coords(rank)
    last = where.pipe == plan.mesh.pipe - 1  # scores exist there; tensor ranks have the same ones
    counted = last and where.tensor == 0 and where.sequence == 0
    totals = {task: [0.0] * len(_COLUMNS) for task in tasks}
    for step in steps:
        result = executor.run(step)
        if not last:
            continue
        for index, scores in sorted(result.scores.items()):
            micro_batch = step.plan.replica_of(rank).micro_batches[index]
            by_sample = _by_sample(scores, step.batches[index], len(micro_batch.samples))
            if sequence_group is not None:
                dist.all_reduce(by_sample, group=sequence_group)
            if not counted:
                continue
            for sample, (loss, right, targets) in zip(micro_batch.samples, by_sample.tolist(), strict=True):
                total = totals[sample.task]
                total[0] += loss
                total[1] += targets
                total[2] += float(targets > 0 and right == targets)
                total[3] += 1
    flat = sum_over_ranks([value for task in tasks for value in totals[task]], group)
    width = len(_COLUMNS)
    summed = {task: flat[i * width : (i + 1) * width] for i, task in enumerate(tasks)}
    whole = [sum(column) for column in zip(*summed.values(), strict=True)] or [0.0] * width
    report = _report(whole)
    if len(tasks) > 1:
        report["tasks"] = {task or "other": _report(values) for task, values in summed.items()}
    return report


def _by_sample(scores: TargetScores, batch: PackedBatch, samples: int) -> Tensor:
    """[samples, 3] fp64: summed loss, targets that are the argmax, targets; of this rank's targets."""
    owner = batch.sample_of_target
    table = torch.zeros((samples, 3), dtype=torch.float64, device=owner.device)
    columns = (scores.loss.double(), scores.correct.double(), torch.ones_like(scores.loss).double())
    return table.index_add_(0, owner, torch.stack(columns, dim=1))


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
