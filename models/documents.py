"""Which document each token of a packed sequence belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from omni_ds.parallel.layer_groups import index

if TYPE_CHECKING:
    from models.packed import PackedBatch


@dataclass(frozen=True)
class Documents:
    """Documents of a packed sequence, and which of them the tokens here belong to.

    Attributes:
        index: [T] int64, document of each token of this shard.
        lengths: [n] fp32, tokens of each document of the whole sequence.
        counted: [n] fp32, 0.0 for what is not data: padding, samples whose media failed.
        sequence: ranks that hold the other shards.
    """

    index: Tensor
    lengths: Tensor
    counted: Tensor
    sequence: ProcessGroup | None = None

    @classmethod
    def of(cls, batch: PackedBatch, sequence: ProcessGroup | None) -> Documents:
        """Of a micro-batch or its shard; nothing waits for the device."""
        edges = batch.cu_seqlens.long()
        start = batch.bounds[index(sequence)] if batch.bounds is not None else 0
        positions = torch.arange(start, start + batch.tokens, device=edges.device)
        lengths = edges.diff().float()
        counted = torch.ones_like(lengths)
        if batch.padding:
            counted[-1:] = 0.0
        for document in batch.lost:
            counted[document : document + 1] = 0.0
        return cls(torch.searchsorted(edges[1:], positions, right=True), lengths, counted, sequence)
