"""The vision tower of Qwen3-VL and Qwen3-Omni on packed images: Qwen2-VL's with learned positions and
deepstack features.

Positions are a square table, interpolated to each image's grid. Features of inner layers go through mergers
of their own and stand behind those of the last layer in a row: [row | level 0 | ...], by rising layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from models.encoders.qwen_vision import QwenVisionEncoder
from models.transfer import on_device
from omni_ds.plan.towers.qwen3_vision import Qwen3VisionMeta


class Mergers(nn.Module):
    """HF's mergers of one tower under their own names. name: of the list of those of inner layers; order:
    place in it of each level's merger."""

    def __init__(self, merger: nn.Module, name: str, others: nn.ModuleList, order: Sequence[int]):
        super().__init__()
        self.merger, self._name, self._order = merger, name, tuple(order)
        self.add_module(name, others)

    def forward(self, tokens: Tensor) -> Tensor:
        """[T, C * (1 + D)] -> rows [R, H * (1 + D)]."""
        others = self.get_submodule(self._name)
        mergers = [self.merger, *(others[place] for place in self._order)]
        parts = tokens.chunk(len(mergers), dim=1)
        return torch.cat(
            [merger(part.contiguous()) for merger, part in zip(mergers, parts, strict=True)], dim=1
        )


class Qwen3VisionEncoder(QwenVisionEncoder):
    """Item: [channels, height, width], sides a multiple of ``patch * factor``."""

    meta: Qwen3VisionMeta

    def __init__(self, meta: Qwen3VisionMeta, config: PreTrainedConfig, recompute: bool = False):
        self.taps = tuple(sorted(config.deepstack_visual_indexes))
        super().__init__(meta, config, recompute)

    def _tower(self, config: PreTrainedConfig) -> PreTrainedModel:
        if config.model_type.startswith("qwen3_omni"):  # AutoModel does not know it
            from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionEncoder

            return Qwen3OmniMoeVisionEncoder._from_config(config)
        return AutoModel.from_config(config)

    def _take_projector(self, tower: PreTrainedModel) -> nn.Module:
        layers = list(tower.config.deepstack_visual_indexes)
        name = next(name for name in ("deepstack_merger_list", "merger_list") if name in tower._modules)
        order = [layers.index(layer) for layer in self.taps]
        mergers = Mergers(tower.merger, name, tower.get_submodule(name), order)
        del tower._modules[name], tower.merger
        return mergers

    def _embed(self, patches: Tensor, at: Tensor, grid: Tensor) -> Tensor:
        hidden = super()._embed(patches, at, grid)
        indices, weights = (on_device(x, hidden.device) for x in position_taps(at, grid, self.meta.table))
        positions = (self.tower.pos_embed(indices) * weights.unsqueeze(2)).sum(1)
        return hidden + positions.to(hidden.dtype)


def position_taps(at: Tensor, grid: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Entries of a square table and their weights, both [T, 4]: bilinear, corners on corners, as HF's.

    at, grid: [T, 2] int64, row and column of a patch, rows and columns of its image.
    """
    place = at.float() * (side - 1) / (grid - 1).clamp(min=1)
    low = place.floor()
    part, low = place - low, low.long()
    ends, shares = torch.stack([low, (low + 1).clamp(max=side - 1)]), torch.stack([1 - part, part])
    rows, columns = ends.unbind(2)  # [2, T]
    indices = rows.unsqueeze(1) * side + columns.unsqueeze(0)  # [2, 2, T]
    weights = shares[:, None, :, 0] * shares[None, :, :, 1]
    return indices.flatten(0, 1).T, weights.flatten(0, 1).T
