"""The vision side of Gemma3: SigLIP with its last norm, pooling, norm and linear."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from models.encoders.base import ItemSlice
from models.encoders.vit import VitEncoder
from omni_ds.plan.towers.gemma3 import Gemma3VisionMeta


class Gemma3Projector(nn.Module):
    """HF's ``Gemma3MultiModalProjector`` on packed tokens."""

    def __init__(self, meta: Gemma3VisionMeta, eps: float):
        super().__init__()
        self.factor = meta.factor
        self.mm_input_projection_weight = nn.Parameter(torch.zeros(meta.hidden, meta.out_hidden))
        self.mm_soft_emb_norm = Gemma3RMSNorm(meta.hidden, eps=eps)

    def forward(self, features: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """features [sum of rows * columns, C] -> [sum of rows * columns / factor^2, H]."""
        rows = self._means(features, grids)
        return self.mm_soft_emb_norm(rows) @ self.mm_input_projection_weight

    def _means(self, features: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """Of squares of factor x factor tokens, each token in row-major order."""
        squares = []
        for item, (rows, columns) in zip(features.split([r * c for r, c in grids]), grids, strict=True):
            cut = item.view(rows // self.factor, self.factor, columns // self.factor, self.factor, -1)
            squares.append(cut.mean(dim=(1, 3)).flatten(0, 1))
        return torch.cat(squares)


class Gemma3VisionEncoder(VitEncoder):
    """Item: [channels, height, width] of the tower's size."""

    def __init__(self, meta: Gemma3VisionMeta, config: PreTrainedConfig, recompute: bool = False):
        super().__init__(meta, config, recompute, Gemma3Projector(meta, config.layer_norm_eps))
        self.unused = ()  # the last norm takes part

    def features(self, values: Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        hidden, grids = super().features(values)
        return self.tower.post_layernorm(hidden), grids

    def slice_features(self, value: Tensor, part: ItemSlice) -> tuple[Tensor, tuple[int, int]]:
        hidden, grid = super().slice_features(value, part)
        return self.tower.post_layernorm(hidden), grid
