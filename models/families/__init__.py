"""HF multimodal models that ``omni.model.path`` takes: one line for each ``model_type`` of config.json."""

from models.families.base import ModelFamily
from models.families.internvl import internvl_sections
from models.families.llava import llava_sections
from models.families.llava_onevision import onevision_sections, onevision_towers

FAMILIES: dict[str, ModelFamily] = {
    "qwen2_vl": ModelFamily("Qwen2VLForConditionalGeneration", grid_positions=True),
    "qwen2_5_vl": ModelFamily("Qwen2_5_VLForConditionalGeneration", grid_positions=True),
    "llava": ModelFamily("LlavaForConditionalGeneration", llava_sections),
    "llava_onevision": ModelFamily(
        "LlavaOnevisionForConditionalGeneration", onevision_sections, onevision_towers
    ),
    "internvl": ModelFamily(
        "InternVLForConditionalGeneration",
        internvl_sections,
        around={"image": ("start_image_token", "end_image_token")},
    ),
    "qwen2_audio": ModelFamily("Qwen2AudioForConditionalGeneration"),
}
