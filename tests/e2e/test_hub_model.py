"""A multimodal model by its name, as the hub has it and without a network: flat config.json, bounds of pixels
and template in the files of older releases."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from families import make_model, model_config, write_rows
from tiny import ROOT, write_config


def hub_cache(home: Path) -> Path:
    """The cache of a hub that holds ``org/tiny``; returns the folder of its files."""
    files = home / "hub" / "models--org--tiny" / "snapshots" / "abc"
    make_model("qwen2_5_vl", files)
    refs = home / "hub" / "models--org--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    config = json.loads((files / "config.json").read_text())
    text, vision = config.pop("text_config"), config["vision_config"]
    for key in ("rope_parameters", "layer_types", "dtype", "model_type"):
        text.pop(key, None)
    config.pop("dtype", None)
    vision.pop("rope_parameters", None)
    vision |= {"model_type": "qwen2_5_vl", "in_chans": 3, "spatial_patch_size": 4}
    rope = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    (files / "config.json").write_text(json.dumps(text | config | rope | {"torch_dtype": "float32"}))
    processor = json.loads((files / "preprocessor_config.json").read_text())
    size = processor.pop("size")
    processor |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    (files / "preprocessor_config.json").write_text(json.dumps(processor))
    template = files / "chat_template.jinja"
    (files / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    template.unlink()
    return files


@pytest.mark.full
def test_a_model_of_the_hub_trains_and_comes_out_as_it_was(tmp_path: Path) -> None:
    files = hub_cache(tmp_path)
    raw = model_config("org/tiny", write_rows(tmp_path / "rows"), tmp_path / "run", train={"max_steps": 1})
    config = write_config(raw, tmp_path / "config.json")
    env = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "run.py", "--deepspeed_config", str(config)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    export = tmp_path / "run" / "export"
    side = {path.name for path in files.iterdir()} - {"model.safetensors"}
    assert {path.name for path in export.iterdir()} == side | {"model.safetensors", "omni_export.json"}
    assert all((export / name).read_bytes() == (files / name).read_bytes() for name in side)
