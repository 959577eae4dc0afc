"""SigLIP, CLIP and DINOv2 vision towers on packed images of any size.

The features are those LLaVA takes: HF's ``hidden_states[feature_layer]``. In transformers these towers record
the residual stream, so *no* index is followed by the final norm, -1 included
(``capture_outputs(tie_last_hidden_states= False)``); CLIP's index 0 is after its pre-norm. The tower is built
with the layers below the feature layer only and without pooling head: as an HF class with
``num_hidden_layers`` reduced, whose ``vision_feature_layer`` is -1. The final norm stays because the class
has it; it takes no part and never trains.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig

from models.attention import ATTENTION_NAME
from models.encoders.base import Encoder, ItemSlice
from models.encoders.resize import resize_grids
from models.linears import compute_as_product
from omni_ds.plan.encoder_meta import EncoderMeta

_NO_DROPOUT = (
    "attention_dropout",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "projection_dropout",
    "drop_path_rate",
)


def vit_config(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """Config of the tower that is built: ``layers`` layers, no head, no dropout, packed attention."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if config.model_type in ("siglip_vision_model", "siglip2_vision_model"):
        config.vision_use_head = False
    for key in _NO_DROPOUT:
        if hasattr(config, key):
            setattr(config, key, 0.0)
    config._attn_implementation = ATTENTION_NAME
    return config


class VitEncoder(Encoder):
    """A vision tower. Item: [channels, height, width], already resized and normalised."""

    def __init__(
        self,
        meta: EncoderMeta,
        config: PreTrainedConfig,
        recompute: bool = False,
        projector: nn.Module | None = None,
    ):
        super().__init__(meta, AutoModel.from_config(vit_config(config, meta.layers)), recompute, projector)
        dino = meta.model_type.startswith("dinov2")
        self.unused = (
            ("tower.layernorm.weight", "tower.layernorm.bias", "tower.embeddings.mask_token")
            if dino
            else ("tower.post_layernorm.weight", "tower.post_layernorm.bias")
        )
        self._dino = dino
        if isinstance(self._convolution, nn.Conv2d):
            compute_as_product(self._convolution)
        self.tower.embeddings.forward = self.embed

    def constants(self) -> dict[str, Tensor]:
        scales = {
            name: torch.full(parameter.shape, self.config.layerscale_value)
            for name, parameter in self.named_parameters()
            if name.endswith(".lambda1")
        }
        masks = {
            name: torch.zeros(parameter.shape)
            for name, parameter in self.named_parameters()
            if name.endswith(".mask_token")
        }
        return scales | masks

    @property
    def layers(self) -> nn.ModuleList:
        encoder = self.tower.encoder
        return encoder.layer if hasattr(encoder, "layer") else encoder.layers

    def embed(
        self,
        images: Sequence[Tensor],
        tokens: tuple[int, int] | None = None,
        shape: Sequence[int] | None = None,
    ) -> Tensor:
        """Images [channels, height, width] -> packed tokens [sum of prefix + patches, C], positions added.

        ``tokens``: only these of a single image, [start, stop); the convolution runs on their patches alone.
        ``shape``: (height, width) of the whole of that image, which begins with the row of patches of the
        first of them; None: it is whole.

        The ``forward`` of the tower's embeddings module, in the place of HF's, which takes one size a call.
        The calls of modules do not depend on the images, because under ZeRO-3 a call is a collective, and a
        weight is read only while its module runs. Same arithmetic as HF's otherwise.
        """
        patch = self.meta.patch
        shapes = [image.shape[1:] for image in images] if shape is None else [shape]
        grids = [(height // patch, width // patch) for height, width in shapes]
        pieces = [_patches(image, patch) for image in images]
        counts = [rows * columns for rows, columns in grids]
        start, stop = (0, 0) if tokens is None else (max(0, end - self.meta.prefix) for end in tokens)
        if tokens is not None:
            skipped = 0 if shape is None else start - start % grids[0][1]
            pieces, counts = [pieces[0][start - skipped : stop - skipped]], [stop - start]
        embedded = self._project(torch.cat(pieces))
        positions = self._positions(dict.fromkeys(grids))
        prefix = self._prefix()
        items = []
        for piece, grid in zip(embedded.split(counts), grids, strict=True):
            table, before = positions[grid], positions[grid].shape[0] - grid[0] * grid[1]
            head, tail = table[:before], table[before:]
            if tokens is not None:
                tail = tail[start:stop]
            if prefix is not None and (tokens is None or tokens[0] == 0):
                # registers follow the CLS token and have no position
                items += [prefix[:1] + head, prefix[1:]]
            items.append(piece + tail)
        return torch.cat(items)

    def _project(self, patches: Tensor) -> Tensor:
        """[n, channels, patch, patch] -> [n, C]."""
        convolution = self._convolution
        return convolution(patches.to(convolution.weight.device, convolution.weight.dtype)).flatten(1)

    @property
    def _convolution(self) -> nn.Module:
        embeddings = self.tower.embeddings
        if hasattr(embeddings, "patch_embeddings"):  # DINOv2, InternVL
            return embeddings.patch_embeddings.projection
        return embeddings.patch_embedding

    def _prefix(self) -> Tensor | None:
        """CLS token and registers [prefix, C]."""
        embeddings = self.tower.embeddings
        if self._dino:
            registers = getattr(embeddings, "register_tokens", None)
            cls = embeddings.cls_token[0]
            return cls if registers is None else torch.cat([cls, registers[0]])
        return embeddings.class_embedding[None] if self.meta.prefix else None

    def _positions(self, grids: Collection[tuple[int, int]]) -> dict[tuple[int, int], Tensor]:
        """Position embeddings [rows * columns, C] of each grid, after one for the CLS token if any."""
        embeddings, patch, side = self.tower.embeddings, self.meta.patch, self.meta.image // self.meta.patch
        if self._dino:  # HF's method reads parameters of this very module
            width = self.meta.hidden
            return {
                (rows, columns): embeddings.interpolate_pos_encoding(
                    torch.empty(1, 1 + rows * columns, width, device="meta"), rows * patch, columns * patch
                )[0]
                for rows, columns in grids
            }
        table = embeddings.position_embedding(embeddings.position_ids)[0]
        prefix, native = table[: self.meta.prefix], table[self.meta.prefix :].view(side, side, -1)
        others = [grid for grid in grids if grid != (side, side)]
        tables = {grid: table for grid in grids}
        for grid, resized in zip(others, resize_grids(native, others), strict=True):
            tables[grid] = torch.cat([prefix, resized]) if len(prefix) else resized
        return tables

    def slice_features(self, value: Tensor, part: ItemSlice) -> tuple[Tensor, tuple[int, int]]:
        prefix, columns = self.meta.prefix, value.shape[2] // self.meta.patch
        tokens = part.bounds[part.index], part.bounds[part.index + 1]
        hidden = self.tower.embeddings([value], tokens, part.shape)
        if hasattr(self.tower, "pre_layrnorm"):
            hidden = self.tower.pre_layrnorm(hidden)
        hidden = self.run_layers(self.layers, hidden, [part.bounds[-1]], part.ulysses)
        if part.index == 0:
            hidden = hidden[prefix:]
        patches = hidden.shape[0]
        whole_rows = self.meta.reduction == "pixel_shuffle"
        return hidden, (patches // columns, columns) if whole_rows else (1, patches)

    def features(self, values: Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        hidden = self.tower.embeddings(list(values))
        if hasattr(self.tower, "pre_layrnorm"):
            hidden = self.tower.pre_layrnorm(hidden)
        prefix, patch = self.meta.prefix, self.meta.patch
        grids = [(value.shape[1] // patch, value.shape[2] // patch) for value in values]
        segments = [prefix + rows * columns for rows, columns in grids]
        hidden = self.run_layers(self.layers, hidden, segments)
        if self.meta.keep_prefix:
            return hidden, [(1, length) for length in segments]
        if prefix:
            hidden = torch.cat([item[prefix:] for item in hidden.split(segments)])
        return hidden, grids


def _patches(image: Tensor, patch: int) -> Tensor:
    """[channels, height, width] -> [rows * columns, channels, patch, patch]; a remainder is left out."""
    rows, columns = image.shape[1] // patch, image.shape[2] // patch
    image = image[:, : rows * patch, : columns * patch]
    return (
        image.unflatten(2, (columns, patch)).unflatten(1, (rows, patch)).permute(1, 3, 0, 2, 4).flatten(0, 1)
    )
