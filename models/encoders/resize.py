"""Position embeddings of other grids, as matrix products.

Interpolation is linear and separable: one matrix for rows and one for columns, made once for each
pair of sizes by torch's own interpolation of the identity. As products they run forward and backward at the
speed of products; torch's kernels for them take longer than the rest of a vision tower.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    ask for it than the device to do it."""
    if len(grids) < 2:
        return tuple(resize_grid(table, grid, mode=mode, antialias=antialias) for grid in grids)
    axes = []  # of rows and of columns: how each line of all grids mixes the table's, and each place's line
    for axis, native in enumerate(table.shape[:2]):
        sizes = [grid[axis] for grid in grids]
        starts = accumulate(sizes[:-1], initial=0)
        lines = [torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        others = [grid[1 - axis] for grid in grids]
        places = [
            each.repeat(other) if axis else each.repeat_interleave(other)
            for each, other in zip(lines, others, strict=True)
        ]
        weights = torch.cat([_weights(native, size, mode, antialias) for size in sizes])
        axes += [on_device(weights, table.device), on_device(torch.cat(places), table.device)]
    resized = _Mixed.apply(table.float().flatten(0, 1), *axes).to(table.dtype)
    return resized.split([rows * columns for rows, columns in grids])


class _Mixed(torch.autograd.Function):
    """Table [height * width, C] -> [places, C]. The matrix between, [places, height * width], is made again
    in the backward pass: it is about as large as a layer's input."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, *axes: Tensor) -> Tensor:
        ctx.save_for_backward(*axes)
        return _mixing(*axes) @ table

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _mixing(*ctx.saved_tensors).t() @ gradient, None, None, None, None


def _mixing(rows: Tensor, row_of: Tensor, columns: Tensor, column_of: Tensor) -> Tensor:
    rows, columns = rows.index_select(0, row_of), columns.index_select(0, column_of)
    return (rows.unsqueeze(2) * columns.unsqueeze(1)).flatten(1)
