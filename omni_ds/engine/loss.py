"""What the LLM's last layer says of the target tokens of a micro-batch."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TargetScores:
    """By target token of a micro-batch: ``loss`` [N] fp32; ``correct`` [N] bool, the target is the argmax."""

    loss: Tensor
    correct: Tensor


@torch.no_grad()
def target_scores(output: Tensor) -> TargetScores:
    """The scores in the output [2, N] of a last layer in evaluation: losses, and 1.0 where the argmax is
    right."""
    losses, correct = output
    return TargetScores(losses, correct > 0)
