"""bf16 weights with fp32 masters, sums of gradients and AdamW, without an engine."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import Parameter


class MasterAdamW:
    """What a mixed-precision optimizer does in a loop written by hand; gradients are clipped to norm 1."""

    def __init__(self, parameters: Iterable[Parameter]):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.masters = [p.detach().float().clone() for p in self.parameters]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-5, fused=self.masters[0].is_cuda)

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the gradients of a backward pass to the sums."""
        used = [i for i, parameter in enumerate(self.parameters) if parameter.grad is not None]
        torch._foreach_add_([self.masters[i].grad for i in used], [self.parameters[i].grad for i in used])
        for i in used:
            self.parameters[i].grad = None

    @torch.no_grad()
    def step(self) -> None:
        gradients = [master.grad for master in self.masters]
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        torch._foreach_mul_(gradients, (1.0 / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, self.masters)
        for gradient in gradients:
            gradient.zero_()
