"""LLaVA: which hidden states of a CLIP or SigLIP tower are the features."""

from __future__ import annotations

from transformers import PreTrainedConfig

from models.families.base import Section
from omni_ds.errors import UserError

WHERE = "omni.model.path"


def llava_sections(config: PreTrainedConfig) -> dict[str, Section]:
    """What config.json says in our words; UserError for a projector or a selection that is not built."""
    layer, strategy = config.vision_feature_layer, config.vision_feature_select_strategy
    tower, text = config.vision_config, config.get_text_config()
    if not isinstance(layer, int):
        raise UserError(
            f"{WHERE}: vision_feature_layer {layer} joins several layers, which is not supported; use a "
            "model with one"
        )
    if config.projector_hidden_act != "gelu" or not config.multimodal_projector_bias:
        raise UserError(
            f"{WHERE}: a projector with {config.projector_hidden_act} and multimodal_projector_bias "
            f"{config.multimodal_projector_bias} is not supported; LLaVA-1.5's has gelu and biases"
        )
    if tower.model_type not in ("clip_vision_model", "siglip_vision_model"):
        raise UserError(f"{WHERE}: a {tower.model_type} tower is not supported; CLIP and SigLIP are")
    has_class_token = tower.model_type == "clip_vision_model"
    if strategy == "default" and not has_class_token:
        raise UserError(
            f'{WHERE}: vision_feature_select_strategy "default" drops the first token, which in '
            f'{tower.model_type} is a patch of the image; such a model is trained with "full"'
        )
    return {
        "vision": {
            "feature_layer": layer,
            "feature_select": "patch" if strategy == "default" else "full",
            "projector": {"reduction": "none", "hidden_size": text.hidden_size},
            "processor": {"min_pixels": None, "max_pixels": None},  # all images have the processor's size
        }
    }
