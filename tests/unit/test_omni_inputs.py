"""Tokens and positions of Qwen2.5-Omni and Qwen3-Omni: those of HF's processors and get_rope_index."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from data.index import open_dataset
from data.sounds import interleaved
from omni_ds.composition import complete, read_composition
from omni_ds.config.load import validate
from omni_ds.errors import UserError
from omni_ds.plan.clock import Clock
from tests.families import family_config, make_model, model_config, rows_of

CHUNKS, TIMES = Clock(25, 50, 1, 2), Clock(13.0, 0, 1, 2)


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_tokens_and_positions_are_those_of_hf(family: str, tmp_path: Path) -> None:
    from tests.parity.model_reference import hf_model, hf_samples

    model, rows = make_model(family, tmp_path / "model"), rows_of(family, tmp_path, 36)
    config = complete(validate(family_config(family, model, rows, tmp_path)))
    parts = read_composition(config)
    metas = {meta.name: meta for meta in parts.encoders}
    dataset = open_dataset(
        config.omni.data.train, config.omni.data, parts.text, parts.media, metas, builder=True
    )
    hf, samples, heard, fractions = hf_model(model), hf_samples(model, rows), 0, 0
    assert len(dataset) == 36
    for number in range(len(dataset)):
        sample, inputs = dataset.encode(number), samples.inputs(number)
        assert inputs["input_ids"][0].tolist() == sample.input_ids.tolist(), samples.rows[number]
        mask = inputs.get("feature_attention_mask")
        expected, _ = hf.get_rope_index(
            inputs["input_ids"],
            inputs.get("image_grid_thw"),
            inputs.get("video_grid_thw"),
            inputs["attention_mask"],
            inputs.get("use_audio_in_video", False),
            None if mask is None else mask.sum(-1),
            inputs.get("video_second_per_grid"),
        )
        positions = torch.as_tensor(sample.positions)
        assert torch.equal(expected[:, 0].to(positions.dtype), positions), samples.rows[number]
        heard += "use_audio_in_video" in inputs
        fractions += not np.array_equal(sample.positions, np.floor(sample.positions))
    assert heard > 3
    assert bool(fractions) == (family == "qwen3_omni_moe")


def test_a_second_of_video_then_its_sound() -> None:
    assert interleaved(3, 4, 1.0, 60, CHUNKS) == ((False, 8), (True, 50), (False, 4), (True, 10))
    assert interleaved(2, 4, 1.0, 10, CHUNKS) == ((False, 8), (True, 10))


def test_each_step_before_the_sound_that_follows_it() -> None:
    assert interleaved(3, 4, 1.0, 60, TIMES) == (
        *((False, 4), (True, 13), (False, 4), (True, 13), (False, 4)),
        (True, 34),
    )
    assert interleaved(3, 4, 0.5, 5, TIMES) == ((False, 4), (True, 5), (False, 8))


def test_sound_of_videos_for_a_model_that_does_not_hear_it(tmp_path: Path) -> None:
    model = make_model("qwen2_5_vl", tmp_path / "model")
    raw = model_config(model, tmp_path / "rows.jsonl", tmp_path, data={"use_audio_in_video": True})
    with pytest.raises(UserError, match="use_audio_in_video: this model does not hear"):
        read_composition(complete(validate(raw)))


def test_a_clip_that_is_too_short(tmp_path: Path) -> None:
    import soundfile

    model = make_model("qwen2_5_omni_thinker", tmp_path / "model")
    soundfile.write(tmp_path / "a.wav", np.zeros(320), 16000)
    messages = [{"role": "user", "content": "<audio>?"}, {"role": "assistant", "content": "two"}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": messages, "audios": ["a.wav"]}) + "\n")
    config = complete(validate(model_config(model, rows, tmp_path, ("audio",), data={"on_error": "raise"})))
    parts = read_composition(config)
    metas = {meta.name: meta for meta in parts.encoders}
    with pytest.raises(UserError, match="rows.jsonl:1: audio does not fit its encoder: .* 2 mel frames"):
        open_dataset(config.omni.data.train, config.omni.data, parts.text, parts.media, metas, builder=True)
