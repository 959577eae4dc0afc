"""Vision towers on images that come as tiles of one size, each a segment of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.encoders.vit import VitEncoder
from omni_ds.plan.towers.tiles import TiledMeta


class TiledEncoder(VitEncoder):
    """Item: [channels, tiles, side, side], already normalised."""

    meta: TiledMeta

    def minimal_values(self, device: torch.device | str, dtype: torch.dtype) -> list[Tensor]:
        meta = self.meta
        tiles = meta.tiles(meta.minimal_shape())
        return [torch.zeros(meta.channels, tiles, meta.image, meta.image, device=device, dtype=dtype)]

    def features(self, values: Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        """Of all tiles [sum of rows * columns, C], and the (rows, columns) of each."""
        return super().features([tile for value in values for tile in value.unbind(1)])
