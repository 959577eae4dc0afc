"""SigLIP2's NaFlex tower: patches through a linear layer, positions resized for every size of image."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from models.encoders.vit import VitEncoder


class NaflexEncoder(VitEncoder):
    """``Siglip2VisionModel`` on packed images, without padded patches or a mask. Items as in VitEncoder."""

    def _project(self, patches: Tensor) -> Tensor:
        linear = self.tower.embeddings.patch_embedding
        rows = patches.permute(0, 2, 3, 1).flatten(1)  # channels last, as HF's processor flattens a patch
        return linear(rows.to(linear.weight.device, linear.weight.dtype))

    def _positions(self, grids: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Tensor]:
        """Of each grid, [rows * columns, C], interpolated as HF does: bilinear, antialiased, also at the
        native size."""
        embedding, side = self.tower.embeddings.position_embedding, self.meta.image // self.meta.patch
        table = embedding(torch.arange(side * side, device=embedding.weight.device))
        # contiguous: torch 2.13 on CPU resizes channels-last images to one column wrongly
        native = table.view(1, side, side, -1).permute(0, 3, 1, 2).contiguous()
        if native.device.type == "cpu":  # there is no antialiasing of bf16 on CPU
            native = native.float()
        return {
            grid: F.interpolate(native, size=grid, mode="bilinear", align_corners=False, antialias=True)[0]
            .flatten(1)
            .T.to(table.dtype)
            for grid in grids
        }
