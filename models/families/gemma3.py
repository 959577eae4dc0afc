"""Gemma3: how its images become feature rows, and what its processor writes around them."""

from __future__ import annotations

from math import isqrt
from typing import Any

from transformers import PreTrainedConfig

from models.families.base import Section
from omni_ds.errors import UserError

WHERE = "omni.model.path"


def gemma3_sections(config: PreTrainedConfig) -> dict[str, Section]:
    """What config.json says in our words; UserError for what is not built or does not fit."""
    tower, rows = config.vision_config, config.mm_tokens_per_image
    if tower.model_type != "siglip_vision_model":
        raise UserError(f"{WHERE}: a {tower.model_type} tower is not supported; Gemma3's is SigLIP")
    patches, side = tower.image_size // tower.patch_size, isqrt(rows)
    if side**2 != rows or patches % side:
        raise UserError(
            f"{WHERE}: mm_tokens_per_image {rows} does not divide {patches} x {patches} patches into squares"
        )
    return {
        "vision": {
            "projector": {"type": "gemma3", "factor": patches // side},
            "processor": {"min_pixels": None, "max_pixels": None},  # all images have the processor's size
        }
    }


def gemma3_written(config: PreTrainedConfig, tokenizer: Any) -> dict[str, str]:
    """The template writes the token that begins an image; ``Gemma3Processor`` surrounds the rest with it."""
    begin, row, end = tokenizer.convert_ids_to_tokens(
        [config.boi_token_id, config.image_token_id, config.eoi_token_id]
    )
    return {begin: f"\n\n{begin}{row}{end}\n\n"}
