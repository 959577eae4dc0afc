"""The table of docs/models.md, of what the tests walk: ``python tests/families/table.py`` prints it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from families import FAMILIES  # noqa: E402
from parity.test_models import FAST, FULL  # noqa: E402

NAMES = {
    "qwen2_vl": "Qwen2-VL (`qwen2_vl`)",
    "qwen2_5_vl": "Qwen2.5-VL (`qwen2_5_vl`)",
    "qwen3_vl": "Qwen3-VL (`qwen3_vl`)",
    "qwen3_vl_moe": "Qwen3-VL-MoE (`qwen3_vl_moe`)",
    "llava": "LLaVA (`llava`), CLIP + Llama",
    "llava_siglip": "LLaVA (`llava`), SigLIP + Qwen2",
    "llava_onevision": "LLaVA-OneVision (`llava_onevision`)",
    "internvl": "InternVL (`internvl`), Qwen3",
    "internvl_llama": "InternVL (`internvl`), Llama",
    "qwen2_audio": "Qwen2-Audio (`qwen2_audio`)",
    "gemma3": "Gemma3 (`gemma3`)",
    "voxtral": "Voxtral (`voxtral`)",
    "qwen2_5_omni": "Qwen2.5-Omni thinker (`qwen2_5_omni`, `qwen2_5_omni_thinker`)",
    "qwen3_omni_moe": "Qwen3-Omni-MoE thinker (`qwen3_omni_moe`, `qwen3_omni_moe_thinker`)",
}
MEDIA = ("image", "video", "audio")
LAYOUTS = ("pp2", "tp2", "sp2", "ep2", "pp2tp2", "pp2ep2", "zero3")


def lines() -> list[str]:
    """A row for each family; a layout is said where a test of that name trains the family in it."""
    tested = {*FAST, *FULL}
    columns = ("family (`model_type`)", "name in tests", *MEDIA, "MoE", *LAYOUTS)
    table = [" | ".join(columns), " | ".join("---" for _ in columns)]
    for name, family in FAMILIES.items():
        media = ["yes" if medium in family.media else "-" for medium in MEDIA]
        layouts = ["yes" if (name, layout) in tested else "-" for layout in LAYOUTS]
        experts = "yes" if family.experts else "-"
        table.append(" | ".join((NAMES[name], f"`{name}`", *media, experts, *layouts)))
    return [f"| {line} |" for line in table]


if __name__ == "__main__":
    print("\n".join(lines()))
