"""HF's processors of models with tiles, where torchvision, which their video half needs, is not installed."""

from __future__ import annotations

from typing import Any

from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

PROCESSORS = {"llava_onevision": LlavaOnevisionProcessor, "internvl": InternVLProcessor}
"""By the ``model_type`` of a checkpoint."""


def tiled_processor(config: Any, tokenizer: Any, images: Any) -> Any:
    """The processor without its video half: enough for ``replace_image_token``. images: its image half."""
    cls = PROCESSORS[config.model_type]
    made, vision = object.__new__(cls), config.vision_config
    made.image_processor, made.tokenizer = images, tokenizer
    if cls is InternVLProcessor:
        made.image_seq_length = config.image_seq_length
        made.image_token = tokenizer.context_image_token
        made.start_image_token, made.end_image_token = tokenizer.start_image_token, tokenizer.end_image_token
        return made
    made.num_image_tokens = (vision.image_size // vision.patch_size) ** 2
    made.vision_feature_select_strategy = config.vision_feature_select_strategy
    made.vision_aspect_ratio, made.image_token = config.vision_aspect_ratio, "<image>"
    return made
