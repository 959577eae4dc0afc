"""SigLIP2's NaFlex tower: patches through a linear layer, positions resized for every size of image."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from models.encoders.resize import resize_grids
from models.encoders.vit import VitEncoder


class NaflexEncoder(VitEncoder):
    """``Siglip2VisionModel`` on packed images, without padded patches or a mask. Items as in VitEncoder."""

    def _project(self, patches: Tensor) -> Tensor:
        linear = self.tower.embeddings.patch_embedding
        rows = patches.permute(0, 2, 3, 1).flatten(1)  # channels last, as HF's processor flattens a patch
        return linear(rows.to(linear.weight.device, linear.weight.dtype))

    def _positions(self, grids: Collection[tuple[int, int]]) -> dict[tuple[int, int], Tensor]:
        """Of each grid, [rows * columns, C], bilinear with antialiasing, as HF resizes them."""
        embedding, side = self.tower.embeddings.position_embedding, self.meta.image // self.meta.patch
        table = embedding(torch.arange(side * side, device=embedding.weight.device))
        native = table.view(side, side, -1)
        others = [grid for grid in grids if grid != (side, side)]
        resized = resize_grids(native, others, mode="bilinear", antialias=True)
        return {grid: table for grid in grids} | dict(zip(others, resized, strict=True))
