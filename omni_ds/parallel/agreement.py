"""Agreement of all ranks before something collective happens.

Every rank computes the same step plan from the same metadata. Should that ever fail (other files on one
node, a worker that could not decode a medium), it must be noticed before ranks enter different collectives.
Both exchanges use one small message per rank on the CPU group.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from omni_ds.errors import UserError
from omni_ds.plan.build import StepPlan

T = TypeVar("T")


class AgreedError(UserError):
    """A UserError that every rank raises at the same place, so that all can leave the world in order."""


_FIELDS = ("step", "plan hash", "micro-batches", "windows", "target tokens", "samples")


def _gather_integers(values: list[int], group: ProcessGroup) -> list[list[int]]:
    mine = torch.tensor(values, dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [values.tolist() for values in everyone]


def agree_on_step(plan: StepPlan, failed_rows: list[int], group: ProcessGroup) -> tuple[int, ...]:
    """Compare this rank's step plan with everybody's and learn which rows failed anywhere.

    Returns:
        The rows whose media some rank could not decode, ascending, the same on every rank.

    Raises:
        AgreedError: plans differ; the message names the first rank that differs and every differing field.
    """
    windows = len(plan.replicas[0].windows)
    mine = [plan.step, plan.hash, plan.micro_batches, windows, plan.target_tokens, plan.samples]
    everyone = _gather_integers([*mine, len(failed_rows)], group)
    for rank, values in enumerate(everyone):
        if values[:-1] != everyone[0][:-1]:
            pairs = zip(_FIELDS, everyone[0], values, strict=False)
            differing = "; ".join(
                f"{name}: {a} on rank 0, {b} on rank {rank}" for name, a, b in pairs if a != b
            )
            raise AgreedError(
                f"step {plan.step}: rank {rank} computed another plan than rank 0 ({differing}). "
                "All ranks must read the same data files and the same configuration."
            )
    most = max(values[-1] for values in everyone)
    if most == 0:
        return ()
    padded = failed_rows + [-1] * (most - len(failed_rows))
    return tuple(sorted({row for rows in _gather_integers(padded, group) for row in rows if row >= 0}))


def same_everywhere(work: Callable[[], T]) -> T:
    """``work`` that is a function of what all ranks share: its UserError is one of all ranks, unasked."""
    try:
        return work()
    except UserError as error:
        raise AgreedError(str(error)) from None


def all_or_error(work: Callable[[], T], group: ProcessGroup) -> T:
    """Run ``work`` on every rank; if it fails with a UserError on any, raise an AgreedError on all.

    Without this a rank that finds a missing file would leave the others waiting in a collective. ``work``
    itself must contain no collective.
    """
    result, error = None, None
    try:
        result = work()
    except UserError as caught:
        error = str(caught)
    errors: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, error, group=group)
    first = next((message for message in errors if message is not None), None)
    if first is not None:
        raise AgreedError(first)
    return result  # type: ignore[return-value]


def broadcast_from_rank_0(work: Callable[[], T], group: ProcessGroup) -> T:
    """The result of ``work`` on rank 0, on every rank; an AgreedError on all if it fails there."""
    outcome: list[object] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            outcome[0] = work()
        except UserError as error:
            outcome[1] = str(error)
    dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise AgreedError(outcome[1])
    return outcome[0]  # type: ignore[return-value]
