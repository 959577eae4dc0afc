"""Encoders in numbers, where a tower is no plain one with our projector: one file each, one line here."""

from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.towers.gemma3 import Gemma3VisionMeta
from omni_ds.plan.towers.internvl import InternVLMeta
from omni_ds.plan.towers.omni_audio import OmniAudioMeta
from omni_ds.plan.towers.onevision import TOWER_TYPE, OneVisionMeta
from omni_ds.plan.towers.qwen3_vision import Qwen3VisionMeta
from omni_ds.plan.towers.qwen_audio import QwenAudioMeta
from omni_ds.plan.towers.qwen_vision import QwenVisionMeta
from omni_ds.plan.towers.voxtral import VoxtralMeta

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
    "voxtral_encoder": VoxtralMeta,
    "internvl_vision": InternVLMeta,
    TOWER_TYPE: OneVisionMeta,
}
"""By :func:`omni_ds.plan.encoder_geometry.tower_type`."""
PROJECTORS: dict[str, type[EncoderMeta]] = {"gemma3": Gemma3VisionMeta}
"""By the projector's ``type``, where the tower is a plain one."""
