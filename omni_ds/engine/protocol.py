"""What the step executor needs of an LLM engine; handlers are written once against this."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from models.packed import PackedBatch
from omni_ds.plan.actions import Action

Handler = Callable[[Action], None]


class LLMEngine(Protocol):
    """One rank's pipeline stage with its optimizer.

    ``trainable`` is False for a fully frozen LLM, whose optimizer methods do nothing.
    """

    dtype: torch.dtype
    trainable: bool

    def run(self, actions: Sequence[Action], micro_batches: int, handler: Handler) -> None:
        """Execute a step's actions in order, each through ``handler``."""
        ...

    def forward(self, batch: PackedBatch, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Hidden states [T, H] of this stage; on the last one losses of the targets, [N], or in evaluation
        [2, N] with 1 where the target is the argmax. And the router losses of its layers, a fp32 scalar not
        divided by any count; None without experts."""
        ...

    def backward(self, output: Tensor, gradient: Tensor | None, auxiliary: Tensor | None = None) -> None:
        """Accumulate parameter gradients of ``output`` and of the scalar ``auxiliary``; a scalar loss takes
        no ``gradient``."""
        ...

    def reduce_tied(self) -> None:
        """Sum the gradients of tied weights over the stages that hold them."""
        ...

    def reduce(self) -> None:
        """Average the accumulated gradients over the data axis (ZeRO-2 and 3 did, in every backward)."""
        ...

    def squared_norm(self) -> Tensor:
        """Squared gradient norm over all stages, float64 scalar on any device; valid after :meth:`reduce`."""
        ...

    def step(self, norm: float, clip: float) -> None:
        """Clip by the joint ``norm``, update the weights, clear the gradients."""
        ...

    def skip_step(self) -> None:
        """Drop the gradients of this step."""
        ...

    def train(self, mode: bool = True) -> object:
        """Training or evaluation mode of the stage's layers."""
        ...
