"""Texts and media of multimodal checkpoints at index time: positions, and what is refused with its row."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data.index import open_dataset
from data.media import MediaHeader
from data.positions import GridPositions, sequence_positions
from omni_ds.composition import complete, read_composition
from omni_ds.config import validate
from omni_ds.errors import UserError
from omni_ds.plan.sample import Item, SampleMeta
from tests.families import make_model, model_config, rows_of, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen2_5_vl", tmp_path_factory.mktemp("model"))


def opened(model: Path, folder: Path, rows: list[dict], tower: str = "vision", **data):
    write_rows(folder, 3)
    path = folder / "given.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = complete(validate(model_config(model, path, folder, (tower,), data=data)))
    parts = read_composition(config)
    metas = {meta.name: meta for meta in parts.encoders}
    return open_dataset(
        config.omni.data.train, config.omni.data, parts.text, parts.media, metas, builder=True
    )


def row(question: str, **more) -> dict:
    return {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "two"}],
        **more,
    }


REFUSED = {
    "text contains a placeholder token": row("What is <|image_pad|>?"),
    "text contains a placeholder token.*stands for media": row("<image> <|image_pad|>?", images=["1-0.png"]),
    "more <image> tags than images": row("<image><image>?", images=["1-0.png"]),
    "more images than <image> tags": row("<image>?", images=["1-0.png", "2-0.png"]),
    "image file not found": row("<image>?", images=["none.png"]),
    "no encoder for audio": row("<audio>?", audios=["a.wav"]),
    "media in plain text": {"text": "<image> is two", "images": ["1-0.png"]},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_row_is_refused_with_its_place(reason: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"given.jsonl:2: {reason}"):
        opened(model, tmp_path, [row("1 + 1?"), REFUSED[reason]], on_error="raise")


def test_an_image_for_a_model_of_sound(tmp_path: Path) -> None:
    model = make_model("qwen2_audio", tmp_path / "model")
    with pytest.raises(UserError, match="given.jsonl:1: no encoder for image: .* takes text and audio"):
        opened(model, tmp_path / "rows", [row("<image>?", images=["1-0.png"])], "audio", on_error="raise")


def test_a_sample_above_the_cap_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="given.jsonl:1: longer than max_length: [0-9]+ tokens, 12 allowed"):
        opened(model, tmp_path, [row("<image>?", images=["2-0.png"])], on_error="raise", max_length=12)


def test_an_image_for_a_model_without_a_tower_of_its_name(model: Path, tmp_path: Path) -> None:
    raw = model_config(model, tmp_path / "rows.jsonl", tmp_path)
    raw["omni"]["encoders"]["audio"] = {"freeze": True}
    with pytest.raises(UserError, match="omni.encoders.audio: .* has no part of this name.* vision"):
        complete(validate(raw))


def test_what_the_checkpoint_decides_cannot_be_set(model: Path, tmp_path: Path) -> None:
    raw = model_config(model, tmp_path / "rows.jsonl", tmp_path)
    raw["omni"]["encoders"]["vision"]["modality"] = "audio"
    with pytest.raises(UserError, match="omni.encoders.vision.modality is 'audio', but the checkpoint has"):
        complete(validate(raw))


def test_a_completed_configuration_completes_to_itself(model: Path, tmp_path: Path) -> None:
    config = complete(validate(model_config(model, tmp_path / "rows.jsonl", tmp_path)))
    assert complete(validate(config.to_dict())) == config


def test_bounds_of_pixels_decide_the_size(model: Path, tmp_path: Path) -> None:
    raw = model_config(model, tmp_path / "rows.jsonl", tmp_path)
    raw["omni"]["encoders"]["vision"]["processor"] = {"min_pixels": 64, "max_pixels": 256}
    config = complete(validate(raw))
    preprocess = read_composition(config).media["vision"]

    assert preprocess.plan_shape(MediaHeader("image", 100, 100)) == (16, 16)
    header = MediaHeader("video", 100, 100, times=np.arange(4) / 2, fps=2.0)
    assert preprocess.plan_shape(header) == (4, 16, 16)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_positions_are_those_of_hf(family: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    from tests.parity.model_reference import HFSamples

    model = make_model(family, tmp_path / "model")
    lines = rows_of(family, tmp_path, 24).read_text().splitlines()
    dataset = opened(model, tmp_path, [json.loads(line) for line in lines])
    hf = AutoModelForImageTextToText.from_pretrained(model)
    samples, spread = HFSamples(model, tmp_path / "given.jsonl"), 0
    assert len(dataset) == 24
    for number in range(len(dataset)):
        sample, inputs = dataset.encode(number), samples.inputs(number)
        assert inputs.pop("input_ids")[0].tolist() == sample.input_ids.tolist()
        if not inputs:
            assert (sample.positions == np.arange(sample.meta.tokens)).all() and len(sample.positions) == 3
            continue
        spread += "second_per_grid_ts" in inputs
        for key in ("pixel_values", "pixel_values_videos"):
            inputs.pop(key, None)
        ids = torch.as_tensor(sample.input_ids)[None]
        assert torch.equal(
            hf.model.get_rope_index(input_ids=ids, **inputs)[0][:, 0], torch.as_tensor(sample.positions)
        )
    assert bool(spread) == (family == "qwen2_5_vl")


LLAVA_15 = (  # the structure of LLaVA-1.5's: pictures first, then all text, no token that ends a turn
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}"
    "{% endif %}{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\\n' }}{% endfor %}{% if message['role'] != 'assistant' %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' '}}"
    "{% endfor %}{% else %}{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ part['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def test_a_template_that_puts_pictures_first_and_ends_no_turn(tmp_path: Path) -> None:
    model = make_model("llava", tmp_path / "model")
    rows = [row("Which digit? <image>", images=["1-0.png"])]
    dataset = opened(model, tmp_path / "rows", rows, chat_template=LLAVA_15)
    sample, tokenizer = dataset.encode(0), dataset.text.tokenizer
    text = tokenizer.decode(sample.input_ids)
    assert text.startswith("USER: " + "<image>" * 16 + "\nWhich digit?")
    targets = [token for token in sample.labels.tolist() if token >= 0]
    assert tokenizer.decode(targets).split() == ["two" + tokenizer.eos_token]


def test_pixels_of_a_tower_of_one_size_cannot_be_bounded(tmp_path: Path) -> None:
    model = make_model("llava", tmp_path / "model")
    raw = model_config(model, tmp_path / "rows.jsonl", tmp_path)
    raw["omni"]["encoders"]["vision"]["processor"] = {"max_pixels": 256}
    with pytest.raises(UserError, match="omni.encoders.vision.processor.max_pixels is 256, but"):
        complete(validate(raw))


def test_positions_go_on_behind_the_larger_side() -> None:
    item = Item(0, 0, "vision", (8, 24), (12,), 3, ((2, 3),))
    meta = SampleMeta(0, 7, 1, (item,))
    assert GridPositions({"vision": SimpleNamespace(side=8)})(meta).tolist() == [
        [0, 1, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 5, 6],
        [0, 1, 2, 3, 4, 5, 6],
    ]
    assert sequence_positions(meta).tolist() == list(range(7))
