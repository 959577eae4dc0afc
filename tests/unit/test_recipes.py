"""The recipes for published checkpoints: planned from bundled sizes, whose parameters are HF's."""

from pathlib import Path

import pytest

from models.multimodal import read_model
from omni_ds.composition import complete, plan_of, read_composition
from omni_ds.config import load_config, resolve

ROOT = Path(__file__).parents[2]
RECIPES = {
    "qwen2.5-vl-3b": ("Qwen2.5-VL-3B-Instruct", 3_754_622_976),
    "qwen2.5-vl-7b": ("Qwen2.5-VL-7B-Instruct", 8_292_166_656),
    "llava-1.5-7b": ("llava-1.5-7b-hf", None),
    "qwen2-audio-7b": ("Qwen2-Audio-7B-Instruct", 8_397_094_912),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_plans_offline_for_eight_gpus(recipe: str) -> None:
    name, published = RECIPES[recipe]
    path = ROOT / "ds_configs" / "models" / name
    config = complete(load_config(ROOT / "ds_configs" / f"{recipe}.json", [f"omni.model.path={path}"]))
    parts = read_composition(config, processors=False)
    plan = plan_of(resolve(config, 8, None, has_cuda=False), parts, 8)
    counted = plan.llm.parameters
    counted += sum(meta.tower_parameters + meta.projector_parameters for meta in plan.encoders)
    model = read_model(config.omni.model).model
    above = sum(  # LLaVA's features come from below the tower's last layer
        p.numel() for n, p in model.named_parameters() if "vision_tower.encoder.layers.23." in n
    )
    assert counted + above == sum(p.numel() for p in model.parameters())
    assert published in (None, counted)
