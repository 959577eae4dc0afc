"""LLaVA-OneVision: LLaVA whose images are cut into tiles (anyres), by one line of config.json."""

from __future__ import annotations

import re

from transformers import PreTrainedConfig

from models.families.base import Section
from models.families.llava import llava_sections
from omni_ds.errors import UserError
from omni_ds.plan.towers.onevision import TOWER_TYPE

WHERE = "omni.model.path"


def onevision_sections(config: PreTrainedConfig) -> dict[str, Section]:
    """As LLaVA's; UserError for features that do not make a square."""
    sections = llava_sections(config)
    if (
        config.vision_config.model_type == "clip_vision_model"
        and sections["vision"]["feature_select"] == "full"
    ):
        raise UserError(
            f'{WHERE}: vision_feature_select_strategy "full" keeps the class token, which has no place in '
            'the picture; such a model is trained with "default"'
        )
    return sections


def onevision_towers(config: PreTrainedConfig) -> dict[str, Section]:
    """How many tiles of rows an image has at most, and which pictures it may be fitted into."""
    found = re.fullmatch(r"anyres_max_(\d+)", config.vision_aspect_ratio)
    if not found:
        raise UserError(
            f"{WHERE}: vision_aspect_ratio {config.vision_aspect_ratio!r} is not supported; anyres_max_9 and "
            "other numbers are"
        )
    return {
        "vision": {
            "tower_type": TOWER_TYPE,
            "image_grid_pinpoints": [tuple(sides) for sides in config.image_grid_pinpoints],
            "max_tiles": int(found[1]),
        }
    }
