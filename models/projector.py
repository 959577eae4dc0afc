"""From tower features to LLM embeddings: a reduction of the number of rows, then a two-layer MLP.

The MLP is LLaVA's ``multi_modal_projector`` (linear_1, exact GELU, linear_2), names included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.transfer import on_device
from omni_ds.plan.encoder_meta import EncoderMeta


def pixel_shuffle(features: Tensor, rows: int, columns: int, factor: int) -> Tensor:
    """[n * rows * columns, C] in row-major order -> [n * (rows / factor) * (columns / factor), factor^2 * C].

    A row gathers a factor x factor block, channels ordered (row in block, column in block, C): InternVL's
    order (``InternVLModel.pixel_shuffle`` in transformers, scale 1 / factor).
    """
    channels = features.shape[-1]
    blocks = features.view(-1, rows // factor, factor, columns // factor, factor, channels)
    return blocks.transpose(2, 3).reshape(-1, factor * factor * channels)


def frame_stack(features: Tensor, lengths: Sequence[int], factor: int) -> Tensor:
    """[sum(lengths), C] -> [sum(ceil(length / factor)), factor * C]; an item's last group is padded with
    zeros."""
    channels = features.shape[-1]
    if any(length % factor for length in lengths):
        starts, total = [], 0
        for length in lengths:
            starts.append(total)
            total += -(-length // factor) * factor
        positions = torch.cat([start + torch.arange(n) for start, n in zip(starts, lengths, strict=True)])
        padded = features.new_zeros(total, channels)
        features = padded.index_copy(0, on_device(positions, features.device), features)
    return features.reshape(-1, factor * channels)


class Projector(nn.Module):
    """Reduction and MLP. Rows of an item stay together and in order."""

    def __init__(self, meta: EncoderMeta):
        super().__init__()
        self.reduction, self.factor = meta.reduction, meta.factor
        self.linear_1 = nn.Linear(meta.projector_in, meta.projector_hidden)
        self.linear_2 = nn.Linear(meta.projector_hidden, meta.out_hidden)

    def forward(self, features: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """features [sum of rows * columns over items, C] -> [rows after reduction, H of the LLM].

        ``grids``: (rows, columns) of each item's tokens; audio, and images with their CLS token, are (1,
        tokens).
        """
        return self.linear_2(F.gelu(self.linear_1(self._reduce(features, grids))))

    def _reduce(self, features: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        if self.reduction == "none":
            return features
        lengths = [rows * columns for rows, columns in grids]
        if self.reduction == "frame_stack":
            return frame_stack(features, lengths, self.factor)
        if len(set(grids)) == 1:
            return pixel_shuffle(features, *grids[0], self.factor)
        items = features.split(lengths)
        return torch.cat([pixel_shuffle(x, *grid, self.factor) for x, grid in zip(items, grids, strict=True)])
