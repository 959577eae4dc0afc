"""The vision towers of Qwen2-VL, Qwen2.5-VL and Qwen2.5-Omni on packed images and videos.

Tokens of an image stand block by block, a block being the ``factor`` x ``factor`` patches of one feature row:
HF's order, in which the merger joins neighbours. In Qwen2.5-VL the blocks are put in the order of their
windows while the layers run. ``temporal`` frames of a video are joined in the patches and then stand as an
image does. The blocks are HF's; their attention is called here, because HF's cuts its input by ``cu_seqlens``
for back ends it does not know.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from models.attention import ATTENTION_NAME, omni_attention
from models.encoders.base import Encoder, ItemSlice
from models.fused import rotated
from models.linears import compute_as_product
from models.masks import Packing
from models.transfer import on_device
from models.window_attention import can_attend, window_attention
from omni_ds.plan.towers.qwen_vision import QwenVisionMeta, has_windows


@dataclass(frozen=True)
class ImageOrder:
    """Where the tokens of an image stand.

    order: [n] int64, token of each place while layers run; places: its inverse. at: [n, 2] int64, row and
    column of the patch at each place. windows: tokens of each window, in order of places.
    """

    order: Tensor
    places: Tensor
    at: Tensor
    windows: tuple[int, ...]


@lru_cache(maxsize=512)
def image_order(rows: int, columns: int, factor: int, window: int) -> ImageOrder:
    """Of a grid of patches. window: side in blocks; 0: the image is one window, in block order."""
    blocks = torch.arange((rows // factor) * (columns // factor)).view(rows // factor, columns // factor)
    side = window or max(blocks.shape)
    squares = [square for band in blocks.split(side) for square in band.split(side, dim=1)]
    order = torch.cat([square.flatten() for square in squares])
    order = (order.unsqueeze(1) * factor**2 + torch.arange(factor**2)).flatten()
    axes = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    at = torch.stack([_by_block(axis, factor) for axis in axes], dim=1)
    windows = tuple(square.numel() * factor**2 for square in squares)
    return ImageOrder(order, order.argsort(), at[order], windows)


def _by_block(values: Tensor, factor: int) -> Tensor:
    """[rows, columns] -> [rows * columns], blocks of factor x factor together."""
    cut = values.unflatten(1, (-1, factor)).unflatten(0, (-1, factor))  # [R, f, C, f]
    return cut.permute(0, 2, 1, 3).flatten()


def patches_of(value: Tensor, patch: int, factor: int, temporal: int) -> Tensor:
    """Image [channels, height, width] or video [channels, frames, height, width] -> [tokens, channels *
    temporal * patch * patch], step after step in block order: what Qwen's processors make of them."""
    frames = value.unsqueeze(1).expand(-1, temporal, -1, -1) if value.dim() == 3 else value
    cut = frames.unflatten(1, (-1, temporal))
    cut = cut.unflatten(4, (-1, factor, patch)).unflatten(3, (-1, factor, patch))
    # [channels, t, temporal, R, f, patch, C, f, patch]
    return cut.permute(1, 3, 6, 4, 7, 0, 2, 5, 8).flatten(5).flatten(0, 4)


class QwenVisionEncoder(Encoder):
    """Item: [channels, height, width] or [channels, frames, height, width], sides a multiple of ``patch *
    factor``, frames of ``temporal``. HF's merger projects."""

    meta: QwenVisionMeta
    taps: tuple[int, ...] = ()  # layers whose output is a feature too

    def __init__(self, meta: QwenVisionMeta, config: PreTrainedConfig, recompute: bool = False):
        config = copy.deepcopy(config)
        config._attn_implementation = ATTENTION_NAME
        tower = self._tower(config)
        super().__init__(meta, tower, recompute, self._take_projector(tower))
        # Not a buffer: casts to bf16 must not touch it.
        self.frequencies = tower.rotary_pos_emb.inv_freq.detach().clone()
        self.full = frozenset(getattr(config, "fullatt_block_indexes", range(meta.layers)))
        compute_as_product(tower.patch_embed.proj)
        for block in tower.blocks:
            block.attn.forward = partial(_attend, block.attn)

    def _tower(self, config: PreTrainedConfig) -> PreTrainedModel:
        return _tower_class(config)._from_config(config)

    def _take_projector(self, tower: PreTrainedModel) -> nn.Module:
        """What makes feature rows of tokens; it leaves the tower."""
        merger = tower.merger
        del tower.merger
        return merger

    def features(self, values: Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        meta, device = self.meta, values[0].device
        grids = [(value.shape[-2] // meta.patch, value.shape[-1] // meta.patch) for value in values]
        frames = [  # of images and of steps of videos
            grid
            for value, grid in zip(values, grids, strict=True)
            for _ in range(value.shape[1] // meta.temporal if value.dim() == 4 else 1)
        ]
        orders = [image_order(*grid, meta.factor, meta.window_side) for grid in frames]
        lengths = [len(order.order) for order in orders]
        patches = torch.cat([patches_of(v, meta.patch, meta.factor, meta.temporal) for v in values])
        order, places = (
            on_device(_joined(each), device)
            for each in zip(*((o.order, o.places) for o in orders), strict=True)
        )
        hidden = self._run_blocks(
            patches.index_select(0, order),
            torch.cat([each.at for each in orders]),
            torch.tensor(frames).repeat_interleave(torch.tensor(lengths), dim=0),
            Packing.of(lengths, device),
            Packing.of([n for each in orders for n in each.windows], device),
        )
        return hidden.index_select(0, places), grids

    def slice_features(self, value: Tensor, part: ItemSlice) -> tuple[Tensor, tuple[int, int]]:
        meta, device = self.meta, value.device
        height, width = part.shape or value.shape[1:]
        grid = height // meta.patch, width // meta.patch
        whole = image_order(*grid, meta.factor, meta.window_side)
        here = slice(part.bounds[part.index], part.bounds[part.index + 1])
        # Slices are whole bands of windows: what stands here are the tokens from here.start on, and cropped
        # pixels begin with them.
        order, ulysses = whole.order[here], part.ulysses
        if part.shape is not None:
            order = order - here.start
        patches = patches_of(value, meta.patch, meta.factor, meta.temporal)
        hidden = self._run_blocks(
            patches.index_select(0, on_device(order, device)),
            whole.at[here],
            torch.tensor([grid]).expand(len(order), -1),
            replace(Packing.of([len(whole.order)], device), ulysses=ulysses),
            replace(Packing.of(whole.windows, device), ulysses=ulysses),
        )
        return hidden.index_select(0, on_device(order.argsort(), device)), (1, len(order))

    def _run_blocks(
        self, patches: Tensor, at: Tensor, grid: Tensor, whole: Packing, windows: Packing
    ) -> Tensor:
        """Patches in the order of places, with their rows and columns and those of their image's grid, each
        [T, 2] -> tower tokens [T, C], and behind them those of the layers in ``taps``."""
        hidden, rotary, tapped = self._embed(patches, at, grid), self._rotary(at, patches.device), []
        for index, block in enumerate(self.tower.blocks):
            packing = whole if index in self.full else windows
            if self.recompute and torch.is_grad_enabled():
                hidden = checkpoint(
                    _run, block, hidden, packing, rotary, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden = _run(block, hidden, packing, rotary)
            if index in self.taps:
                tapped.append(hidden)
        return torch.cat([hidden, *tapped], dim=1) if tapped else hidden

    def _embed(self, patches: Tensor, at: Tensor, grid: Tensor) -> Tensor:
        """Tower tokens [T, C] before the first layer."""
        return self.tower.patch_embed(patches)

    def project(self, features: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        return self.projector(features)

    def _rotary(self, at: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos, sin [T, head size] in fp32: the first half of the angles turns with the row, the other with
        the column."""
        frequencies = on_device(self.frequencies, device)
        angles = (on_device(at, device).unsqueeze(2).float() * frequencies).flatten(1)
        angles = torch.cat([angles, angles], dim=1)
        return angles.cos(), angles.sin()


def _tower_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    # AutoModel does not know all of them.
    if config.model_type.startswith("qwen2_5_omni"):
        from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniVisionEncoder

        return Qwen2_5OmniVisionEncoder
    if not has_windows(config.model_type):
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

        return Qwen2VisionTransformerPretrainedModel
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    return Qwen2_5_VisionTransformerPretrainedModel


def _joined(orders: Sequence[Tensor]) -> Tensor:
    """Orders of images or steps as one order of their tokens one after the other."""
    joined, start = [], 0
    for order in orders:
        joined.append(order + start)
        start += len(order)
    return torch.cat(joined)


def _run(block: nn.Module, hidden: Tensor, packing: Packing, rotary: tuple[Tensor, Tensor]) -> Tensor:
    return block(hidden, cu_seqlens=packing, position_embeddings=rotary)


def _attend(
    attention: nn.Module,
    hidden_states: Tensor,
    cu_seqlens: Packing,
    position_embeddings: tuple[Tensor, Tensor],
    **kwargs: object,
) -> Tensor:
    """The ``forward`` of HF's vision attention on hidden states [T, C], with a Packing in the place of
    ``cu_seqlens``."""
    if hasattr(attention, "qkv"):
        projected = (attention.qkv(hidden_states),)
    else:
        projected = tuple(project(hidden_states) for project in (attention.q, attention.k, attention.v))
    if can_attend(hidden_states, cu_seqlens, position_embeddings[0].shape[1]):
        return attention.proj(
            window_attention(projected, attention.num_heads, *position_embeddings, cu_seqlens)
        )
    parts = projected[0].chunk(3, dim=1) if len(projected) == 1 else projected
    query, key, value = (x.unflatten(1, (attention.num_heads, -1)) for x in parts)  # [T, heads, size]
    query, key = rotated(query, key, *position_embeddings)
    heads = [x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)]
    out, _ = omni_attention(attention, *heads, cu_seqlens)
    return attention.proj(out.squeeze(0).flatten(1))
