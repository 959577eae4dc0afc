"""The vision tower of Qwen3-VL and Qwen3-Omni in numbers: that of Qwen2-VL with learned positions,
interpolated to the grid of an image, and mergers of inner layers beside that of the last (deepstack).

A feature row has a level for each of those: what the LLM adds behind its first layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from omni_ds.errors import UserError
from omni_ds.plan.towers.qwen_vision import QwenVisionMeta

# transformers' Qwen3VLVisionConfig
_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}


@dataclass(frozen=True)
class Qwen3VisionMeta(QwenVisionMeta):
    """See the module. ``table``: side of the square of learned positions."""

    table: int = 0

    @classmethod
    def from_config(
        cls, name: str, encoder: Any, hf_config: Mapping[str, Any], llm_hidden: int
    ) -> Qwen3VisionMeta:
        where = f"omni.encoders.{name}"
        config = _DEFAULTS | {key: value for key, value in hf_config.items() if value is not None}
        patch, temporal = config["patch_size"], config["temporal_patch_size"]
        if not isinstance(patch, int) or not isinstance(temporal, int):
            raise UserError(
                f"{where}: patches of {patch} x {temporal} are not supported; they are not square"
            )
        if config["out_hidden_size"] != llm_hidden:
            raise UserError(
                f"{where}: the tower makes rows of {config['out_hidden_size']}, the LLM has width "
                f"{llm_hidden}; config.json holds parts of different models"
            )
        hidden, layers, intermediate = config["hidden_size"], config["depth"], config["intermediate_size"]
        positions, channels = config["num_position_embeddings"], config["in_channels"]
        levels = set(config["deepstack_visual_indexes"])
        if len(levels) < len(config["deepstack_visual_indexes"]) or not levels <= set(range(layers)):
            raise UserError(
                f"{where}: deepstack_visual_indexes {config['deepstack_visual_indexes']} are not different "
                f"layers of the {layers} there are"
            )
        layer = 4 * hidden * hidden + 4 * hidden + 2 * hidden * intermediate + intermediate + 5 * hidden
        stem = (channels * temporal * patch**2 + 1 + positions) * hidden
        factor = config["spatial_merge_size"]
        return cls(
            name=name,
            modality="image",
            family="qwen3_vision",
            model_type=hf_config["model_type"],
            hidden=hidden,
            layers=layers,
            heads=config["num_heads"],
            intermediate=intermediate,
            mlp_matrices=2,
            reduction="pixel_shuffle",
            factor=factor,
            projector_hidden=hidden * factor**2,
            out_hidden=llm_hidden,
            tower_trainable=not encoder.freeze,
            projector_trainable=not encoder.projector.freeze,
            tower_parameters=stem + layers * layer,
            patch=patch,
            channels=channels,
            video=True,
            levels=len(levels),
            temporal=temporal,
            full_layers=layers,
            table=isqrt(positions),
        )

    @property
    def projector_parameters(self) -> int:
        """Of all mergers. Norms: of a token in the last layer's, of joined tokens in the others."""
        wide = self.projector_hidden
        matrices = (wide + 1) * wide + (wide + 1) * self.out_hidden
        return (1 + self.levels) * matrices + 2 * self.hidden + 2 * wide * self.levels

    @property
    def projector_flops(self) -> tuple[int, int]:
        first, second = super().projector_flops
        return (1 + self.levels) * first, (1 + self.levels) * second
