"""Encoders in numbers, where a tower is no plain one with our projector: one file each, one line here."""

from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.towers.omni_audio import OmniAudioMeta
from omni_ds.plan.towers.qwen3_vision import Qwen3VisionMeta
from omni_ds.plan.towers.qwen_audio import QwenAudioMeta
from omni_ds.plan.towers.qwen_vision import QwenVisionMeta

TOWERS: dict[str, type[EncoderMeta]] = {
    "qwen2_vl_vision": QwenVisionMeta,
    "qwen2_5_vl_vision": QwenVisionMeta,
    "qwen2_5_omni_vision_encoder": QwenVisionMeta,
    "qwen3_vl_vision": Qwen3VisionMeta,
    "qwen3_vl_moe_vision": Qwen3VisionMeta,
    "qwen3_omni_moe_vision_encoder": Qwen3VisionMeta,
    "qwen2_audio_encoder": QwenAudioMeta,
    "qwen2_5_omni_audio_encoder": OmniAudioMeta,
    "qwen3_omni_moe_audio_encoder": OmniAudioMeta,
}
"""By ``model_type`` of the tower's HF config."""
