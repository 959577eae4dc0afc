"""The head of an LLM over vocabulary shards: losses, and whether they are the argmax.

Shapes: N targets, H hidden size, v vocabulary rows of this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import VocabParallelLinear, set_autotp_mode
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from omni_ds.parallel.layer_groups import even_part
from omni_ds.parallel.linear_cross_entropy import linear_cross_entropy


def target_losses(
    hidden: Tensor, weight: Tensor, target_ids: Tensor, vocab: int, group: ProcessGroup | None, scores: bool
) -> Tensor:
    """Cross-entropy of ``hidden @ weight.T`` over the whole vocabulary.

    Args:
        hidden: [N, H], the same on all ranks of ``group``; its gradient is complete on each.
        weight: [v, H], this rank's rows (``even_part``).
        target_ids: [N] int64 in 0 .. vocab - 1.
        scores: also say where the target is the argmax (the smallest id of equals).

    Returns:
        fp32 losses [N], or with ``scores`` [2, N]: losses, and 1.0 where the target is the argmax. The same
        on all ranks of ``group``.
    """
    start, _ = even_part(vocab, group)
    losses = linear_cross_entropy(hidden, weight, target_ids, start, group)
    if not scores:
        return losses
    return torch.stack([losses, (best_ids(hidden, weight, start, group) == target_ids).to(losses.dtype)])


@torch.no_grad()
def best_ids(hidden: Tensor, weight: Tensor, start: int, group: ProcessGroup | None) -> Tensor:
    """Argmax [N] over the vocabulary, the smallest id of equals. By blocks of at most H rows: logits of a
    block have the size of the hidden states, in their dtype and once more in fp32."""
    best = torch.full(hidden.shape[:1], -torch.inf, device=hidden.device)
    ids = torch.zeros(hidden.shape[:1], dtype=torch.int64, device=hidden.device)
    for first in range(0, weight.shape[0], hidden.shape[1]):
        logits = (hidden @ weight[first : first + hidden.shape[1]].t()).float()
        place = logits.argmax(-1, keepdim=True)
        value = logits.gather(-1, place).squeeze(-1)
        better = value > best
        best = torch.where(better, value, best)
        ids = torch.where(better, place.squeeze(-1) + (start + first), ids)
    if group is not None:
        highest = best.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        ids = torch.where(best == highest, ids, torch.iinfo(torch.int64).max)
        dist.all_reduce(ids, op=dist.ReduceOp.MIN, group=group)
    return ids


class VocabularyHead(VocabParallelLinear):
    """This rank's rows of an untied head; returns losses (:func:`target_losses`), scores when not
    training."""

    def __init__(self, linear: nn.Linear, group: ProcessGroup | None):
        set_autotp_mode(training=True)
        super().__init__(linear, group, name="lm_head")

    def forward(self, hidden: Tensor, target_ids: Tensor) -> Tensor:
        return target_losses(
            hidden, self.weight, target_ids, self.vocab_size, self.mp_group, scores=not self.training
        )
