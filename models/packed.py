"""A packed micro-batch on the device, and the state that flows through the layers of a pipeline stage.

Whole samples lie one after another in one sequence of T tokens; attention stays inside each.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from models.masks import Packing


@dataclass
class PackedBatch:
    """One micro-batch. T tokens, n samples, N targets, R feature rows, H hidden size of the LLM.

    - input_ids, position_ids: [T] int64; positions restart at 0 with each sample.
    - cu_seqlens: [n + 1] int32 on the device, starts with 0; segments: the n lengths on the host.
    - target_positions, target_ids: [N] int64; the logits at token position t predict target_ids, already
      shifted.
    - sample_of_target: [N] int64, which of the n samples a target belongs to.
    - feature_positions: [R] int64, the token a feature row replaces; features: [R, H]. None without media;
      only the first stage has the features.
    - bounds: where each sequence shard of the whole starts, and the end; None when this is the whole.
    - padding: dummy tokens at the end of the whole sequence, its last segment.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    segments: tuple[int, ...]
    target_positions: Tensor
    target_ids: Tensor
    sample_of_target: Tensor
    feature_positions: Tensor | None = None
    features: Tensor | None = None
    bounds: tuple[int, ...] | None = None
    padding: int = 0

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[0]

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch on another device (non-blocking: pinned host tensors copy asynchronously)."""
        moved = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)


@dataclass
class StageState:
    """What every layer takes and returns: the batch and the hidden states [T, H] (None before the embedding).

    ``rotary`` (cos, sin), each [1, T, head size], and ``packing`` are made by the first layer that needs them
    on a stage and handed on to the others. ``auxiliary``: fp32 scalar, what the routers of this stage add to
    the loss, before the division by the target tokens of the global batch; None when they add nothing.
    ``router_counts``: [E] int64 for each MoE layer of this stage in training, choices of its experts.
    """

    batch: PackedBatch
    hidden: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    auxiliary: Tensor | None = None
    router_counts: tuple[Tensor, ...] = ()
    _packing: Packing | None = None

    @property
    def packing(self) -> Packing:
        if self._packing is None:
            self._packing = Packing(self.batch.cu_seqlens, self.batch.segments)
        return self._packing

    def with_hidden(self, hidden: Tensor) -> StageState:
        return replace(self, hidden=hidden)

    def with_routing(self, auxiliary: Tensor | None, counts: Tensor) -> StageState:
        """After a MoE layer: its loss added, its expert counts appended."""
        if auxiliary is not None and self.auxiliary is not None:
            auxiliary = self.auxiliary + auxiliary
        return replace(
            self,
            auxiliary=self.auxiliary if auxiliary is None else auxiliary,
            router_counts=(*self.router_counts, counts),
        )
