"""The norm of gradients that lie on the ranks of a group."""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# DeepSpeed divides by the norm plus this; clipping by the adapters does the same.
CLIP_EPSILON = 1e-6


def squared_norm_of(
    gradients: list[Tensor], norms: list[Tensor], device: torch.device, group: ProcessGroup | None
) -> Tensor:
    """Of ``gradients`` and of others whose ``norms`` are known, summed over ``group``: float64 on
    ``device``."""
    norms = [*(torch._foreach_norm(gradients, dtype=torch.float32) if gradients else ()), *norms]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if norms:  # a stage whose only parameters are counted elsewhere still joins the reduction
        total += torch.stack([norm.reshape(()) for norm in norms]).double().square().sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    return torch.where(total.isfinite(), total, torch.full_like(total, math.inf))
