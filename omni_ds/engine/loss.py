"""Loss of a micro-batch: the sum over its target tokens."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class TargetScores:
    """By target token of a micro-batch: ``loss`` [N] fp32; ``correct`` [N] bool, the target is the argmax."""

    loss: Tensor
    correct: Tensor


def loss_sum(logits: Tensor, target_ids: Tensor) -> Tensor:
    """Cross-entropy summed over the target tokens.

    Args:
        logits: [N, V] of the target rows, any float dtype; computed in fp32.
        target_ids: [N] int64.

    Returns:
        A fp32 scalar; 0 with a graph when N is 0.
    """
    return F.cross_entropy(logits.float(), target_ids, reduction="sum")


@torch.no_grad()
def score_targets(logits: Tensor, target_ids: Tensor) -> TargetScores:
    """Loss and argmax agreement of every target token, for evaluation."""
    logits = logits.float()
    return TargetScores(
        loss=F.cross_entropy(logits, target_ids, reduction="none"),
        correct=logits.argmax(-1) == target_ids,
    )
