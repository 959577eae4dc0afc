"""InternVL (HF form): pixel shuffle and a projector that norms; tokens around an image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from models.families.base import Section
from omni_ds.errors import UserError

WHERE = "omni.model.path"


def internvl_sections(config: PreTrainedConfig) -> dict[str, Section]:
    """What config.json says in our words; UserError for what is not built."""
    layer, strategy = config.vision_feature_layer, config.vision_feature_select_strategy
    factor = round(1 / config.downsample_ratio)
    if not isinstance(layer, int):
        raise UserError(f"{WHERE}: vision_feature_layer {layer} joins several layers, which is not supported")
    if strategy != "default":
        raise UserError(
            f"{WHERE}: vision_feature_select_strategy {strategy!r} keeps the class token, which has no place "
            'in the grid of patches; such a model is trained with "default"'
        )
    if factor < 1 or factor * config.downsample_ratio != 1:
        raise UserError(f"{WHERE}: downsample_ratio {config.downsample_ratio} is not one over a whole number")
    if config.projector_hidden_act != "gelu":
        raise UserError(
            f"{WHERE}: a projector with {config.projector_hidden_act} is not supported; InternVL's has gelu"
        )
    if config.vision_config.model_type != "internvl_vision":
        raise UserError(
            f"{WHERE}: a {config.vision_config.model_type} tower is not supported; internvl_vision is"
        )
    return {
        "vision": {
            "feature_layer": layer,
            "feature_select": "patch",
            "projector": {
                "reduction": "pixel_shuffle",
                "factor": factor,
                "hidden_size": config.get_text_config().hidden_size,
            },
            "processor": {"min_pixels": None, "max_pixels": None},  # all tiles have the processor's size
        }
    }


def internvl_written(config: PreTrainedConfig, tokenizer: Any) -> dict[str, str]:
    """The template writes the placeholder of an image, the processor (``InternVLProcessor``) what surrounds
    it. For a video the template writes a token of its own."""
    token = tokenizer.convert_ids_to_tokens(config.image_token_id)
    written = {token: _surrounded(token, tokenizer)}
    if isinstance(getattr(tokenizer, "video_token", None), str):
        written[tokenizer.video_token] = token
    return written


def internvl_spelled(config: PreTrainedConfig, tokenizer: Any) -> dict[str, Callable[[Any], str]]:
    """A video is its frames as images, each with its number."""
    frame = _surrounded(tokenizer.convert_ids_to_tokens(config.image_token_id), tokenizer)

    def video(planned: Any) -> str:
        return "\n".join(f"Frame{number + 1}: {frame}" for number in range(planned.shape[0]))

    return {"video": video}


def _surrounded(token: str, tokenizer: Any) -> str:
    names = ("start_image_token", "end_image_token")
    if missing := [name for name in names if not isinstance(getattr(tokenizer, name, None), str)]:
        raise UserError(
            f"{WHERE}: the tokenizer has no {missing[0]}, which stands at an image; use the tokenizer of the "
            "same checkpoint (tokenizer_config.json)"
        )
    return token.join(getattr(tokenizer, name) for name in names)
