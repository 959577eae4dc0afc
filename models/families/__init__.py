"""HF multimodal models that ``omni.model.path`` takes: one line for each ``model_type`` of config.json."""

from models.families.base import ModelFamily
from models.families.gemma3 import gemma3_sections, gemma3_written
from models.families.internvl import internvl_sections, internvl_spelled, internvl_written
from models.families.llava import llava_sections
from models.families.llava_onevision import onevision_sections, onevision_towers
from models.families.qwen3_vl import qwen3_spelled
from models.families.qwen_omni import SPEECH, in_chunks, in_time
from models.families.voxtral import voxtral_sections

_QWEN2_5_OMNI = ModelFamily(
    "Qwen2_5OmniThinkerForConditionalGeneration",
    inside="thinker_config",
    unused={"talker.": SPEECH, "token2wav.": SPEECH},
    files=("spk_dict.pt",),
    clock=in_chunks,
)
_QWEN3_OMNI = ModelFamily(
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    inside="thinker_config",
    unused={"talker.": SPEECH, "code2wav.": SPEECH},
    clock=in_time,
)

FAMILIES: dict[str, ModelFamily] = {
    "qwen2_vl": ModelFamily("Qwen2VLForConditionalGeneration", grid_positions=True),
    "qwen2_5_vl": ModelFamily("Qwen2_5_VLForConditionalGeneration", grid_positions=True),
    "qwen3_vl": ModelFamily("Qwen3VLForConditionalGeneration", grid_positions=True, spelled=qwen3_spelled),
    "qwen3_vl_moe": ModelFamily(
        "Qwen3VLMoeForConditionalGeneration", grid_positions=True, spelled=qwen3_spelled
    ),
    "llava": ModelFamily("LlavaForConditionalGeneration", llava_sections),
    "llava_onevision": ModelFamily(
        "LlavaOnevisionForConditionalGeneration", onevision_sections, onevision_towers
    ),
    "internvl": ModelFamily(
        "InternVLForConditionalGeneration",
        internvl_sections,
        written=internvl_written,
        spelled=internvl_spelled,
    ),
    "qwen2_audio": ModelFamily("Qwen2AudioForConditionalGeneration"),
    "qwen2_5_omni": _QWEN2_5_OMNI,
    "qwen2_5_omni_thinker": _QWEN2_5_OMNI,
    "qwen3_omni_moe": _QWEN3_OMNI,
    "qwen3_omni_moe_thinker": _QWEN3_OMNI,
    "gemma3": ModelFamily(
        "Gemma3ForConditionalGeneration", gemma3_sections, blocks=True, written=gemma3_written
    ),
    "voxtral": ModelFamily("VoxtralForConditionalGeneration", voxtral_sections),
}
