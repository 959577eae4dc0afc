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
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig

from models.attention import ATTENTION_NAME
from models.encoders.base import Encoder
from omni_ds.plan.encoder_meta import EncoderMeta

_NO_DROPOUT = ("attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")


def vit_config(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """Config of the tower that is built: ``layers`` layers, no head, no dropout, packed attention."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if config.model_type == "siglip_vision_model":
        config.vision_use_head = False
    for key in _NO_DROPOUT:
        if hasattr(config, key):
            setattr(config, key, 0.0)
    config._attn_implementation = ATTENTION_NAME
    return config


class VitEncoder(Encoder):
    """A vision tower. Item: [channels, height, width], already resized and normalised."""

    def __init__(self, meta: EncoderMeta, config: PreTrainedConfig, recompute: bool = False):
        super().__init__(meta, AutoModel.from_config(vit_config(config, meta.layers)), recompute)
        dino = meta.model_type.startswith("dinov2")
        self.unused = (
            ("tower.layernorm.weight", "tower.layernorm.bias", "tower.embeddings.mask_token")
            if dino
            else ("tower.post_layernorm.weight", "tower.post_layernorm.bias")
        )
        self._interpolates_itself = dino
        if not dino:
            self.tower.embeddings.interpolate_pos_encoding = self.interpolate_positions

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

    @property
    def _patch_convolution(self) -> nn.Conv2d:
        embeddings = self.tower.embeddings
        return (
            embeddings.patch_embeddings.projection
            if self._interpolates_itself
            else embeddings.patch_embedding
        )

    def embed(self, pixels: Tensor) -> Tensor:
        """[n, channels, height, width] -> [n, prefix + patches, C]; positions interpolated off the native
        size."""
        if self._interpolates_itself:
            return self.tower.embeddings(pixels)
        native = pixels.shape[-2:] == (self.meta.image, self.meta.image)
        tokens = self.tower.embeddings(pixels, interpolate_pos_encoding=not native)
        return self.tower.pre_layrnorm(tokens) if hasattr(self.tower, "pre_layrnorm") else tokens

    def interpolate_positions(self, tokens: Tensor, height: int, width: int) -> Tensor:
        """Position embeddings [1, prefix + patches, C] for an image of height x width pixels (SigLIP, CLIP).

        Takes the place of HF's, which reads the embedding's weight from outside its module: under ZeRO-3
        the weight is there only while the module runs. Same arithmetic: bicubic from the native square grid.
        """
        del tokens
        embeddings, prefix, side = self.tower.embeddings, self.meta.prefix, self.meta.image // self.meta.patch
        table = embeddings.position_embedding(embeddings.position_ids)
        grid = table[:, prefix:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
        size = (height // self.meta.patch, width // self.meta.patch)
        grid = F.interpolate(grid, size=size, mode="bicubic", align_corners=False)
        return torch.cat([table[:, :prefix], grid.flatten(2).transpose(1, 2)], dim=1)

    def features(self, values: Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        weight = self._patch_convolution.weight
        items: list[Tensor] = list(values)
        for shape in dict.fromkeys(value.shape for value in values):
            members = [i for i, value in enumerate(values) if value.shape == shape]
            tokens = self.embed(torch.stack([values[i] for i in members]).to(weight.device, weight.dtype))
            for row, i in enumerate(members):
                items[i] = tokens[row]
        segments = [item.shape[0] for item in items]
        hidden = self.run_layers(self.layers, torch.cat(items), segments)
        if self.meta.keep_prefix:
            return hidden, [(1, length) for length in segments]
        prefix, patch = self.meta.prefix, self.meta.patch
        if prefix:
            hidden = torch.cat([item[prefix:] for item in hidden.split(segments)])
        return hidden, [(value.shape[1] // patch, value.shape[2] // patch) for value in values]
