"""How evenly a step's tokens were spread over experts: the metric ``expert_load``."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from models.moe import expert_load


class ExpertCounts:
    """Choices of each expert in the MoE layers of a stage, summed over micro-batches; kept on the device."""

    def __init__(self) -> None:
        self._counts: list[Tensor] = []

    def add(self, counts: Sequence[Tensor]) -> None:
        """counts: [E] of each MoE layer of the stage, for one micro-batch; nothing in evaluation."""
        if counts and self._counts:
            self._counts = [total + more for total, more in zip(self._counts, counts, strict=True)]
        elif counts:
            self._counts = list(counts)

    def load(
        self,
        shape: tuple[int, int],
        device: torch.device,
        stage: ProcessGroup,
        world: ProcessGroup,
    ) -> float:
        """Busiest expert over mean, in the worst layer of the model; starts to count anew.

        Collective, also for a rank that saw no micro-batch. ``shape``: MoE layers of this stage, and experts;
        ``stage``: the ranks of this stage (its tensor ranks count the same tokens, which changes no ratio);
        ``world``: all ranks, on CPU.
        """
        mine = 1.0
        if shape[0]:
            counts = torch.zeros(shape, dtype=torch.int64, device=device)
            if self._counts:
                counts += torch.stack(self._counts)
            dist.all_reduce(counts, group=stage)
            mine = expert_load(list(counts.cpu()))
        worst = torch.tensor([mine], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=world)
        self._counts = []
        return float(worst)
