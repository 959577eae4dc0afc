"""Position embeddings of other grids, as matrix products.

Interpolation is linear and separable: one matrix for rows and one for columns, made once for each
pair of sizes by torch's own interpolation of the identity. As products they run forward and backward at the
speed of products; torch's kernels for them take longer than the rest of a vision tower.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

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


def resize_grids(
    table: Tensor, grids: Sequence[tuple[int, int]], *, mode: str = "bicubic", antialias: bool = False
) -> tuple[Tensor, ...]:
    """:func:`resize_grid` of one table to many grids in one product: grid by grid, the host takes longer to
    ask for it than the device to do it.

    What every place mixes of the table is a row of a matrix [sum of rows * columns, height * width] in fp32.
    """
    if not grids:
        return ()
    device, mixed = table.device, None
    for axis, native in enumerate(table.shape[:2]):
        sizes = [grid[axis] for grid in grids]
        weights = torch.cat([_weights(native, size, mode, antialias) for size in sizes])
        starts = accumulate(sizes[:-1], initial=0)
        at = torch.cat([_places(*grid)[axis] + start for grid, start in zip(grids, starts, strict=True)])
        mine = on_device(weights, device).index_select(0, on_device(at, device))  # [places, native]
        mixed = mine if mixed is None else (mixed.unsqueeze(2) * mine.unsqueeze(1)).flatten(1)
    resized = (mixed @ table.float().flatten(0, 1)).to(table.dtype)
    return resized.split([rows * columns for rows, columns in grids])


@lru_cache(maxsize=1 << 10)
def _places(rows: int, columns: int) -> Tensor:
    """[2, rows * columns] int64: row and column of each place of a grid."""
    return torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")).flatten(1)
