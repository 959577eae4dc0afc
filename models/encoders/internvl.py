"""The vision tower of InternVL on packed tiles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from models.encoders.tiles import TiledEncoder
from models.projector import Projector
from omni_ds.plan.towers.internvl import InternVLMeta


class NormedProjector(Projector):
    """HF's ``multi_modal_projector`` of InternVL: the joined patches are normed before the first linear."""

    def __init__(self, meta: InternVLMeta):
        super().__init__(meta)
        self.layer_norm = nn.LayerNorm(meta.projector_in)

    def _reduce(self, features: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        return self.layer_norm(super()._reduce(features, grids))


class InternVLEncoder(TiledEncoder):
    """Items as in TiledEncoder. The layers are HF's; their attention takes its Packing by attribute."""

    meta: InternVLMeta

    def __init__(self, meta: InternVLMeta, config: PreTrainedConfig, recompute: bool = False):
        super().__init__(meta, config, recompute, NormedProjector(meta))
        norms = () if meta.final_norm else ("tower.layernorm.weight", "tower.layernorm.bias")
        self.unused = (*norms, "tower.embeddings.mask_token")
        self._dino = True  # the same names and the same arithmetic of positions

    def constants(self) -> dict[str, Tensor]:
        scale = self.config.layer_scale_init_value
        return {
            name: torch.full(parameter.shape, scale)
            for name, parameter in self.named_parameters()
            if name.endswith((".lambda_1", ".lambda_2"))
        }

    def features(self, values: Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        hidden, grids = super().features(values)
        return (self.tower.layernorm(hidden) if self.meta.final_norm else hidden), grids
