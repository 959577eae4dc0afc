"""The vision tower of LLaVA-OneVision: a plain ViT on tiles, whose rows are packed as a picture."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from models.encoders.resize import resize_grid
from models.encoders.tiles import TiledEncoder
from models.projector import Projector
from omni_ds.plan.towers.onevision import OneVisionMeta


class PackingProjector(Projector):
    """HF's ``multi_modal_projector`` and what ``pack_image_features`` does with its rows.

    In one module, because under ZeRO-3 ``image_newline`` [H] can be read only while its module runs.
    """

    def __init__(self, meta: OneVisionMeta):
        super().__init__(meta)
        self.meta = meta
        self.image_newline = nn.Parameter(torch.empty(meta.out_hidden))
        nn.init.normal_(self.image_newline, std=meta.out_hidden**-0.5)

    def forward(
        self, features: Tensor, grids: Sequence[tuple[int, int]], shapes: Sequence[Sequence[int]]
    ) -> Tensor:
        """Tower features of all tiles -> rows of items of these shapes [rows, H]."""
        rows = super().forward(features, grids)
        counts = [self.meta.tiles(shape) * self.meta.tile_rows for shape in shapes]
        items = zip(rows.split(counts), shapes, strict=True)
        return torch.cat([piece for item, shape in items for piece in self._packed(item, shape)])

    def _packed(self, rows: Tensor, shape: Sequence[int]) -> list[Tensor]:
        """Of one image: the whole of it, then the picture line by line with a newline behind each."""
        newline = self.image_newline.to(rows.dtype)
        if len(shape) == 3:
            return [self._pooled(rows, shape[0]), newline[None]]
        whole, high, wide = self.meta.tile_rows, *shape[:2]
        if not high * wide:
            return [rows, newline[None]]
        side, picture = self.meta.grid_side, self.meta.picture(shape)
        tiles = rows[whole:].view(high, wide, side, side, -1)
        lines = tiles.transpose(1, 2).reshape(high * side, wide * side, -1)
        lines = lines[picture.top : high * side - picture.top, picture.left : wide * side - picture.left]
        if lines.shape[:2] != (picture.lines, picture.columns):
            resized = resize_grid(lines, (picture.lines, picture.columns), mode="bilinear")
            lines = resized.view(picture.lines, picture.columns, -1)
        ended = torch.cat([lines, newline.expand(picture.lines, 1, -1)], dim=1)
        return [rows[:whole], ended.flatten(0, 1)]

    def _pooled(self, rows: Tensor, frames: int) -> Tensor:
        """Of a video: rows of its frames, resized to half."""
        old, new = self.meta.grid_side, self.meta.frame_side
        side_by_side = rows.view(frames, old, old, -1).permute(1, 2, 0, 3).flatten(2)
        resized = resize_grid(side_by_side, (new, new), mode="bilinear")
        return resized.unflatten(1, (frames, -1)).transpose(0, 1).flatten(0, 1)


class OneVisionEncoder(TiledEncoder):
    """Items as in TiledEncoder, the tile of the whole image first."""

    meta: OneVisionMeta

    def __init__(self, meta: OneVisionMeta, config: PreTrainedConfig, recompute: bool = False):
        super().__init__(meta, config, recompute, PackingProjector(meta))

    def project_items(
        self, features: Tensor, grids: Sequence[tuple[int, int]], shapes: Sequence[Sequence[int]]
    ) -> Tensor:
        return self.projector(features, grids, shapes)
