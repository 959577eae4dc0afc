"""Cross-entropy of a linear head over vocabulary shards, without the logits of all tokens at once.

Where one rank has the whole vocabulary, forward makes the gradients as well, of the sum of the losses: block
by block of the tokens, while the logits are there. Backward then only scales them, as long as all losses
weigh the same, which it sees without reading them.

Otherwise forward goes through the tokens in blocks and keeps two numbers of each; backward makes the logits
again, a block of the vocabulary for all tokens at a time, so that each block's weight gradient is one
product. Nothing waits for the device, and blocks are whole multiples of what matrix kernels like.

Shapes: N targets, H hidden size, v vocabulary rows of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from omni_ds.parallel.products import add_product, product
from omni_ds.plan.activations import LOGITS

ALIGNMENT = 256  # rows or columns of a block


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    start: int,
    group: ProcessGroup | None,
    block: int = LOGITS,
) -> Tensor:
    """Losses [N] fp32 of ``hidden @ weight.T`` over the whole vocabulary; the same on all ranks of ``group``.

    Args:
        hidden: [N, H], the same on all ranks; its gradient is complete on each.
        weight: [v, H], rows ``start`` to ``start + v`` of the vocabulary.
        targets: [N] int64.
        group: ranks that hold the other rows, None where one rank has all.
        block: numbers of logits that exist at a time, about; where gradients are made in forward, twice as
            many, and as many probabilities.
    """
    trains = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    ahead = trains and group is None and len(targets) > 0
    return _LinearCrossEntropy.apply(hidden, weight, targets, start, group, block, ahead)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        start: int,
        group: ProcessGroup | None,
        block: int,
        ahead: bool,
    ) -> Tensor:
        ctx.start, ctx.group, ctx.block, ctx.gradients = start, group, block, None
        if ahead:
            losses, highest, total, ctx.gradients = _with_gradients(
                hidden, weight, targets, 2 * block, ctx.needs_input_grad[:2]
            )
            ctx.save_for_backward(hidden, weight, targets, highest, total)
            return losses
        rows = _aligned(block // max(1, weight.shape[0]))
        # Kept apart: in one log-sum-exp a large offset of all logits would swallow the small sum.
        highest, total, at_target = (
            torch.empty(targets.shape, dtype=torch.float32, device=hidden.device) for _ in range(3)
        )
        for first in range(0, hidden.shape[0], rows):
            here = slice(first, first + rows)
            logits = product(hidden[here], weight.t())
            torch.amax(logits, dim=-1, out=highest[here])
            logits.sub_(highest[here].unsqueeze(1))
            place, mine = _places(targets[here], start, weight.shape[0])
            at_target[here] = logits.gather(1, place).squeeze(1) * mine
            torch.sum(logits.exp_(), dim=-1, out=total[here])
        if group is not None:
            here = highest.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            _, mine = _places(targets, start, weight.shape[0])
            moved = here - highest
            sums = torch.stack([total * moved.exp(), at_target + moved * mine])
            dist.all_reduce(sums, group=group)
            total, at_target = sums
        ctx.save_for_backward(hidden, weight, targets, highest, total)
        return total.log() - at_target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, highest, total = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        # The graph outlives this call; a second pass over it makes them anew.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is not None and not any(gradient.stride()):  # one number, expanded
            ours = (None if x is None else _scaled(x, gradient[0], hidden.dtype) for x in gradients)
            return *ours, None, None, None, None, None
        del gradients
        columns = _aligned(ctx.block // max(1, hidden.shape[0]))
        scale = (gradient / total).unsqueeze(1)
        d_hidden = torch.zeros_like(hidden, dtype=torch.float32) if wants_hidden else None
        d_weight = torch.empty_like(weight) if wants_weight else None
        for first in range(0, weight.shape[0], columns):
            rows = weight[first : first + columns]
            logits = product(hidden, rows.t()).sub_(highest.unsqueeze(1)).exp_().mul_(scale)
            place, mine = _places(targets, ctx.start + first, rows.shape[0])
            logits.scatter_add_(1, place, (gradient * mine).neg_().unsqueeze(1))
            logits = logits.to(hidden.dtype)
            if d_weight is not None:
                torch.mm(logits.t(), hidden, out=d_weight[first : first + columns])
            if d_hidden is not None:
                add_product(d_hidden, logits, rows)
        if d_hidden is not None:
            if ctx.group is not None:
                dist.all_reduce(d_hidden, group=ctx.group)
            d_hidden = d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, None, None, None, None, None


def _with_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, block: int, wants: tuple[bool, bool]
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, Tensor | None]]:
    """Losses [N], highest logit [N], sum of exponentials below it [N], and what is wanted of the gradients of
    the sum of the losses: hidden [N, H], weight [v, H]. All fp32."""
    losses, highest, share = (
        torch.empty(targets.shape, dtype=torch.float32, device=hidden.device) for _ in range(3)
    )
    d_hidden = torch.empty_like(hidden, dtype=torch.float32) if wants[0] else None
    d_weight = None
    rows = _aligned(block // weight.shape[0])
    for first in range(0, hidden.shape[0], rows):
        here = slice(first, first + rows)
        logits, target = product(hidden[here], weight.t()), targets[here].unsqueeze(1)
        torch.amax(logits, dim=-1, out=highest[here])
        below = highest[here] - logits.gather(1, target).squeeze(1)
        probabilities = logits.softmax(-1)
        del logits
        # That of the highest logit is 1 / sum; a target's own may be too small for a number.
        torch.amax(probabilities, dim=-1, out=share[here])
        losses[here] = below - share[here].log()
        gradient = probabilities.scatter_add_(1, target, -torch.ones_like(probabilities[:, :1]))
        gradient = gradient.to(hidden.dtype)
        del probabilities
        if d_hidden is not None:
            d_hidden[here] = product(gradient, weight)
        if not wants[1]:
            continue
        if d_weight is None:
            d_weight = product(gradient.t(), hidden[here])
        else:
            add_product(d_weight, gradient.t(), hidden[here])
    return losses, highest, 1 / share, (d_hidden, d_weight)


def _scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mul(x, scale, out=torch.empty_like(x, dtype=dtype))


def _aligned(count: int) -> int:
    return max(1, count // ALIGNMENT) * ALIGNMENT


def _places(targets: Tensor, start: int, rows: int) -> tuple[Tensor, Tensor]:
    """Of targets among ``rows`` rows from ``start``: column [N, 1], any where they are elsewhere, and [N] 1.0
    where they are here."""
    local = targets - start
    mine = (local >= 0) & (local < rows)
    return local.clamp(0, rows - 1).unsqueeze(1), mine.float()
