"""Position embeddings of another grid, as matrix products.

Interpolation is linear and separable: one matrix for rows and one for columns, made once for each
pair of sizes by torch's own interpolation of the identity. As products they run forward and backward at the
speed of products; torch's kernels for them take longer than the rest of a vision tower.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from models.transfer import on_device


@lru_cache(maxsize=1 << 12)
def _weights(native: int, size: int, mode: str, antialias: bool) -> Tensor:
    """[size, native] fp32: how each place of the new axis mixes those of the old one."""
    # One channel for each old place, and two equal columns: of a single one torch mistakes the memory format.
    identity = torch.eye(native).view(1, native, native, 1).repeat(1, 1, 1, 2)
    resized = F.interpolate(identity, size=(size, 2), mode=mode, align_corners=False, antialias=antialias)
    return resized[0, :, :, 0].T.contiguous()


def resize_grid(
    table: Tensor, grid: tuple[int, int], *, mode: str = "bicubic", antialias: bool = False
) -> Tensor:
    """[height, width, C] -> [rows * columns, C]: ``F.interpolate(align_corners=False)`` to ``grid``, in fp32,
    in the table's dtype."""
    rows, columns = (
        on_device(_weights(native, size, mode, antialias), table.device)
        for native, size in zip(table.shape[:2], grid, strict=True)
    )
    resized = torch.einsum("rh,hwc->rwc", rows, table.float())
    return torch.einsum("kw,rwc->rkc", columns, resized).flatten(0, 1).to(table.dtype)
