"""The recipes for published checkpoints: planned from bundled sizes, whose parameters are HF's."""

from pathlib import Path

import pytest
import torch
import transformers

from models.multimodal import read_model
from omni_ds.composition import Composition, complete, plan_of, read_composition
from omni_ds.config import Config, load_config, resolve
from omni_ds.layout import settle_degrees
from omni_ds.plan.hardware import Device

ROOT = Path(__file__).parents[2]
RECIPES = {
    "qwen2.5-vl-3b": ("Qwen2.5-VL-3B-Instruct", 3_754_622_976),
    "finetune": ("Qwen2.5-VL-3B-Instruct", 3_754_622_976),
    "qwen2.5-vl-7b": ("Qwen2.5-VL-7B-Instruct", 8_292_166_656),
    "llava-1.5-7b": ("llava-1.5-7b-hf", None),
    "qwen3-vl-30b-a3b": ("Qwen3-VL-30B-A3B-Instruct", 31_070_754_032),
    "qwen2-audio-7b": ("Qwen2-Audio-7B-Instruct", 8_397_094_912),
    "qwen3-omni-30b-a3b": ("Qwen3-Omni-30B-A3B-Instruct", None),
    "qwen2.5-omni-7b": ("Qwen2.5-Omni-7B", 8_931_813_888),
}
COMPOSED = ("composed", "siglip-whisper-qwen3-8b")
PARTS = {  # of both, with the parameters of the published checkpoints
    "llm": ("Qwen3-8B", 8_190_735_360),
    "encoders.vision": ("siglip-so400m-patch14-384", 877_960_498),
    "encoders.audio": ("whisper-large-v3", 1_543_490_560),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_plans_offline_for_eight_gpus(recipe: str) -> None:
    name, published = RECIPES[recipe]
    folder = ROOT / "ds_configs" / "models" / name
    config, parts = _read(
        recipe, [f"omni.model.path={folder}", "wandb.enabled=false"]
    )  # wandb: not installed
    plan = plan_of(config, parts, 8)
    counted = plan.llm.parameters
    counted += sum(meta.tower_parameters + meta.projector_parameters for meta in plan.encoders)
    model = read_model(config.omni.model).model
    above = sum(  # LLaVA's features come from below the tower's last layer
        p.numel() for n, p in model.named_parameters() if "vision_tower.encoder.layers.23." in n
    )
    assert counted + above == sum(p.numel() for p in model.parameters())
    assert published in (None, counted)


@pytest.mark.parametrize("recipe", COMPOSED)
def test_a_composed_recipe_plans_offline_for_eight_gpus(recipe: str) -> None:
    folders = {part: ROOT / "ds_configs" / "models" / name for part, (name, _) in PARTS.items()}
    overrides = [f"omni.{part}.path={folder}" for part, folder in folders.items()]
    plan = plan_of(*_read(recipe, overrides), 8)
    whole = {part: _on_meta(folder) for part, folder in folders.items()}
    for part, (_, published) in PARTS.items():
        assert _count(whole[part]) == published
    assert plan.llm.parameters == _count(whole["llm"])
    vision, audio = plan.encoders
    tower = whole["encoders.vision"].vision_model  # its head pools what no feature comes from
    assert vision.tower_parameters == _count(tower) - _count(tower.head)
    assert audio.tower_parameters == _count(whole["encoders.audio"].model.encoder)


def test_degrees_are_chosen_beside_those_that_are_given() -> None:
    paths = [f"omni.{part}.path={ROOT / 'ds_configs' / 'models' / name}" for part, (name, _) in PARTS.items()]
    config, _ = _read(COMPOSED[1], [*paths, "tensor_parallel.autotp_size=auto"])
    assert config.pipeline.stages == 4 and config.tensor_parallel.autotp_size in (1, 2)


def test_all_other_configurations_plan_as_they_are() -> None:
    bundled = {path.stem for path in (ROOT / "ds_configs").glob("*.json")} - {"schema"}
    others = bundled - {*RECIPES, *COMPOSED}
    assert "omni" in others
    for name in others:
        assert plan_of(*_read(name, []), 8).llm.parameters


def _read(recipe: str, overrides: list[str]) -> tuple[Config, Composition]:
    """Settled for eight GPUs of 80 GiB, as `--plan` does it."""
    overrides = [*overrides, "omni.hardware.device_memory_gib=80"]
    config = complete(load_config(ROOT / "ds_configs" / f"{recipe}.json", overrides))
    parts = read_composition(config, processors=False)
    config, _ = settle_degrees(config, 8, Device(), parts)
    return resolve(config, 8, None, has_cuda=True), parts


def _on_meta(folder: Path) -> torch.nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return getattr(transformers, config.architectures[0])(config)


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
