"""The vision tower of InternVL in numbers.

An item is an image as tiles, or a video as frames: (tiles, side, side), each tile with a CLS token that is
dropped. The projector joins squares of ``factor`` x ``factor`` patches, norms them, and is linear, GELU,
linear. No feature row needs two tiles, so that the tiles of an image may be dealt to several ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omni_ds.errors import UserError
from omni_ds.plan.encoder_geometry import square_side, used_layers
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.towers.tiles import TiledMeta

# transformers' InternVLVisionConfig
_DEFAULTS = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "image_size": 448,
    "patch_size": 14,
    "num_channels": 3,
    "norm_type": "layer_norm",
    "attention_bias": False,
    "use_qk_norm": False,
    "use_mask_token": False,
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": True,
}
_EXAMPLE_TILES = 13  # twelve and the whole image: what the released processors make at most


@dataclass(frozen=True)
class InternVLMeta(TiledMeta):
    """See the module. ``final_norm``: the features are behind the tower's last norm."""

    final_norm: bool = False

    @classmethod
    def from_config(
        cls, name: str, encoder: Any, hf_config: Mapping[str, Any], llm_hidden: int
    ) -> EncoderMeta:
        where, config = f"omni.encoders.{name}", _DEFAULTS | dict(hf_config)
        hidden, intermediate = config["hidden_size"], config["intermediate_size"]
        patch = square_side(where, "patch_size", config["patch_size"])
        image = square_side(where, "image_size", config["image_size"])
        whole = config["num_hidden_layers"]
        layers = used_layers(where, hf_config["model_type"], whole, encoder.feature_layer)
        factor, grid = encoder.projector.factor, image // patch
        if grid % factor or not grid:
            raise UserError(
                f"{where}: {grid} x {grid} patches of a tile do not divide by {factor} (downsample_ratio); "
                "config.json holds parts of different models"
            )
        if not config["use_absolute_position_embeddings"]:
            raise UserError(f"{where}: a tower without position embeddings is not supported")
        norm = hidden * (2 if config["norm_type"] == "layer_norm" else 1)
        attention = 4 * hidden**2 + hidden + 3 * hidden * config["attention_bias"]
        attention += 2 * hidden * config["use_qk_norm"]
        mlp = 2 * hidden * intermediate + intermediate + hidden
        stem = config["num_channels"] * patch**2 * hidden + hidden + (grid**2 + 1) * hidden
        stem += hidden * (1 + config["use_mask_token"]) + 2 * hidden * (not config["use_mean_pooling"])
        return cls(
            name=name,
            modality="image",
            family="internvl",
            model_type=hf_config["model_type"],
            hidden=hidden,
            layers=layers,
            heads=config["num_attention_heads"],
            intermediate=intermediate,
            mlp_matrices=2,
            reduction="pixel_shuffle",
            factor=factor,
            projector_hidden=encoder.projector.hidden_size or llm_hidden,
            out_hidden=llm_hidden,
            tower_trainable=not encoder.freeze,
            projector_trainable=not encoder.projector.freeze,
            tower_parameters=stem + layers * (attention + mlp + 2 * norm + 2 * hidden),
            patch=patch,
            image=image,
            channels=config["num_channels"],
            prefix=1,
            video=True,
            most_tiles=_EXAMPLE_TILES,
            final_norm=layers == whole and not config["use_mean_pooling"],
        )

    @property
    def projector_parameters(self) -> int:
        return super().projector_parameters + 2 * self.projector_in

    @property
    def segments_per_slice(self) -> int:
        return 1

    def part_of(self, shape: Sequence[int], first: int, count: int) -> tuple[int, tuple[int, ...]]:
        return first, (min(shape[0] - first, count), *shape[1:])

    def measure(self, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
        tiles, *sides = shape
        if tiles < 1 or any(side != self.image for side in sides):
            raise UserError(
                f"omni.encoders.{self.name}: {tiles} tiles of {sides} pixels; the tower takes squares of "
                f"{self.image}"
            )
        return (self.tile_tokens,) * tiles, tiles * (self.grid_side // self.factor) ** 2

    def minimal_shape(self) -> tuple[int, ...]:
        return 1, self.image, self.image

    def example_shape(self, scale: float) -> tuple[int, ...]:
        return max(1, int(self.most_tiles * scale)), self.image, self.image
