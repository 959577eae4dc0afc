"""Videos of a checkpoint: what is measured, planned, shown, loaded, and refused with its row."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.index import open_dataset
from data.inspect import inspect_samples
from data.loader import EvalLoader
from data.media import MediaHeader
from data.video import Video
from omni_ds.composition import complete, read_composition
from omni_ds.config import validate
from omni_ds.errors import UserError
from omni_ds.plan.build import PlanOptions, build_plan
from omni_ds.plan.cost import EncoderCost
from omni_ds.plan.example import example_samples, mixes_of
from omni_ds.plan.long_short import split_item, split_recordings
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.sample import Item, SampleMeta
from tests.families import make_model, model_config
from tests.parity.hf_videos import hf_video
from tests.videos import numbered, write_video


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen2_5_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """a.mp4 and b.mp4: 20 and 40 frames of 10 a second, 24 x 40 pixels."""
    for name, count in (("a", 20), ("b", 40)):
        write_video(tmp_path / f"{name}.mp4", numbered(count, 24, 40), [100 * n for n in range(count)])
    return tmp_path


def composed(model: Path, folder: Path, processor: dict, **data):
    raw = model_config(model, folder / "given.jsonl", folder, data=data)
    raw["omni"]["encoders"]["vision"]["processor"] = processor
    config = complete(validate(raw))
    return config, read_composition(config)


def opened(model: Path, folder: Path, rows: list[dict], processor: dict | None = None, **data):
    (folder / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, parts = composed(model, folder, processor or {}, **data)
    metas = {meta.name: meta for meta in parts.encoders}
    return open_dataset(
        config.omni.data.train, config.omni.data, parts.text, parts.media, metas, builder=True
    )


def row(question, **more) -> dict:
    return {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "two"}],
        **more,
    }


REFUSED = {
    "text contains a placeholder token: '<|video_pad|>'": row("What is <|video_pad|>?"),
    "text contains a placeholder token.*stands for media": row("<video> <|video_pad|>?", videos=["a.mp4"]),
    "more <video> tags than videos": row("<video><video>?", videos=["a.mp4"]),
    "more videos than <video> tags": row("<video>?", videos=["a.mp4", "b.mp4"]),
    "video file not found": row("<video>?", videos=["none.mp4"]),
    "video file cannot be read": row("<video>?", videos=["given.jsonl"]),
    "image file not found: .*none.png": row("<video>?", videos=[["none.png", "a.png"]]),
    "fps of a video file": row([{"type": "video", "video": "a.mp4", "fps": 2}]),
    "media in plain text": {"text": "<video> is two", "videos": ["a.mp4"]},
    "longer than max_length: [0-9]+ tokens, 60 allowed": row("<video>?", videos=["b.mp4"]),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_row_is_refused_with_its_place(reason: str, model: Path, folder: Path) -> None:
    with pytest.raises(UserError, match=rf"given.jsonl:2: {reason}"):
        opened(model, folder, [row("1 + 1?"), REFUSED[reason]], on_error="raise", max_length=60)


def test_a_video_for_a_model_without(tmp_path: Path) -> None:
    model = make_model("llava", tmp_path / "model")
    with pytest.raises(UserError, match="given.jsonl:1: no encoder for video: .* takes text and image"):
        opened(model, tmp_path, [row("<video>?", videos=["a.mp4"])], on_error="raise")
    with pytest.raises(UserError, match="omni.encoders.vision.processor.fps: .* takes no video; remove it"):
        composed(model, tmp_path, {"fps": 1.0})


def test_parts_spell_videos_in_several_ways(model: Path, folder: Path) -> None:
    for number, frame in enumerate(numbered(3, 24, 40)):
        Image.fromarray(frame).save(folder / f"{number}.png")
    frames = [f"{number}.png" for number in range(3)]
    parts = [
        {"type": "video", "video": "a.mp4"},
        {"type": "video_url", "video_url": {"url": "a.mp4"}},
        {"type": "video", "video": frames, "fps": 1},
        {"type": "video", "frames": frames, "fps": 1},
        {"type": "video", "video": {"frames": frames, "fps": 1}},
    ]
    dataset = opened(model, folder, [row([part, {"type": "text", "text": "?"}]) for part in parts])
    items = [dataset.meta(number).items[0] for number in range(len(parts))]
    assert [item.shape for item in items] == [(4, 24, 40)] * 5
    assert [item.seconds for item in items] == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert not dataset.skipped


def test_keys_of_the_processor(model: Path, folder: Path) -> None:
    header = MediaHeader("video", 100, 200, times=np.arange(300) / 30, fps=30.0)

    def plan(**processor):
        return composed(model, folder, processor)[1].media["vision"].plan(header)

    assert plan().shape == (20, 24, 56)  # the checkpoint's 44 * 44 pixels at most, two frames a second
    assert plan().seconds == 1.0
    assert plan(fps=1).shape[0] == 10 and plan(fps=1).seconds == 2.0
    assert plan(max_frames=7).shape[0] == 6 and plan(fps=0.1, min_frames=8).shape[0] == 8
    assert plan(max_pixels=4096).shape[1:] == plan(video_max_pixels=4096).shape[1:] == (40, 88)
    assert plan(max_pixels=4096, video_max_pixels=1936).shape[1:] == (24, 56)
    assert plan(video_total_pixels=6000).shape[1:] == (16, 32)  # 600 for each of ten pairs
    assert plan(video_min_pixels=8192, video_max_pixels=9000).shape[1:] == (64, 128)
    with pytest.raises(UserError, match="a frame has at least 9000 and at most 1936 pixels"):
        plan(video_min_pixels=9000)
    with pytest.raises(UserError, match="at least 4 and at most 3 frames; set min_frames and max_frames"):
        plan(max_frames=3)


def test_other_settings_make_another_index(model: Path, folder: Path) -> None:
    rows = [row("<video>?", videos=["b.mp4"])]
    assert opened(model, folder, rows).meta(0).items[0].shape[0] == 8
    assert opened(model, folder, rows, {"fps": 1.0}).meta(0).items[0].shape[0] == 4


def test_inspection_shows_videos(model: Path, folder: Path) -> None:
    dataset = opened(model, folder, [row("<video>?", videos=["b.mp4"])])
    text = inspect_samples(dataset, 1)
    (line,) = re.findall("medium 0: .*", text)
    assert "8 frames of 24 x 40 pixels, 1 s a step, 4 * 60 encoder tokens, 60 feature rows" in line
    assert "<|video_pad|>*60" in text


def test_patches_are_those_of_hf(model: Path, folder: Path) -> None:
    """Value for value: frames that are resized, a list of three, whose last is repeated, and files."""
    import torch

    from models.encoders.qwen_vision import patches_of

    rng = np.random.default_rng(0)
    for number in range(3):
        Image.fromarray(rng.integers(0, 255, (70, 50, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    frames = {"frames": [f"{number}.png" for number in range(3)], "fps": 2}
    noise = list(rng.integers(0, 255, (27, 60, 80, 3), dtype=np.uint8))
    write_video(folder / "noise.mp4", noise, [100 * n for n in range(27)])
    videos = [frames, "noise.mp4", "b.mp4"]
    dataset = opened(model, folder, [row("<video>?", videos=[video]) for video in videos])
    processor = dataset.media["vision"].processor
    for number, video in enumerate(videos):
        expected, grid, seconds = hf_video(video, folder, processor)
        item = dataset.meta(number).items[0]
        found = patches_of(torch.as_tensor(dataset.load_media(number, 0)), 4, 2, 2)
        assert torch.equal(found, expected)
        assert grid == [item.shape[0] // 2, item.shape[1] // 4, item.shape[2] // 4]
        assert item.seconds == seconds


def steps(model: Path, folder: Path, dataset, long_short: str):
    _, parts = composed(model, folder, {})
    options = PlanOptions(max_tokens_per_micro_batch=512, long_short=long_short)
    plan = build_plan(parts.llm, parts.encoders, Mesh.from_world(1, pipe=1), options)
    (batch,) = EvalLoader(dataset, len(dataset), plan, 0)
    return batch, [value for window in batch.media.values() for value in window["vision"]]


def test_a_video_that_fails_leaves_zeros_and_a_reason(model: Path, folder: Path) -> None:
    dataset = opened(model, folder, [row("<video>?", videos=[f"{name}.mp4"]) for name in "ab"])
    (folder / "a.mp4").write_bytes((folder / "a.mp4").read_bytes()[:200])
    batch, values = steps(model, folder, dataset, "off")
    assert [number for number, _ in batch.failed] == [0] and "video file cannot be read" in batch.failed[0][1]
    assert {(tuple(v.shape), bool(v.any())) for v in values} == {
        ((3, 4, 24, 40), False),
        ((3, 8, 24, 40), True),
    }
    (folder / "a.mp4").write_bytes((folder / "b.mp4").read_bytes())
    batch, _ = steps(model, folder, dataset, "off")
    assert "video has changed since it was indexed" in batch.failed[0][1]


def test_parts_of_a_video_are_its_frames(model: Path, folder: Path) -> None:
    import torch

    dataset = opened(model, folder, [row("<video>?", videos=["b.mp4"])])
    _, parts = steps(model, folder, dataset, "auto")
    assert [tuple(part.shape) for part in parts] == [(3, 2, 24, 40)] * 4
    whole = dataset.load_media(0, 0)
    assert torch.equal(torch.cat(parts, dim=1), torch.as_tensor(whole))


def test_only_frames_of_the_parts_are_decoded(model: Path, folder: Path, monkeypatch) -> None:
    dataset = opened(model, folder, [row("<video>?", videos=["b.mp4"])])
    whole, asked, original = dataset.load_media(0, 0), [], Video.frames
    monkeypatch.setattr(
        Video, "frames", lambda self, taken: asked.append(len(taken)) or original(self, taken)
    )
    assert (dataset.load_media(0, 0, ((6, 2), (2, 2))) == whole[:, [6, 7, 2, 3]]).all()
    assert asked == [4] and dataset.blank_media(0, 0, ((6, 2), (2, 2))).shape == (3, 4, 24, 40)


def test_costs_of_a_video_are_those_of_its_steps(model: Path, folder: Path) -> None:
    _, parts = composed(model, folder, {})
    (meta,) = parts.encoders
    image, video = meta.measure((24, 40)), meta.measure((12, 24, 40))
    assert meta.forward_flops(*video) == 6 * meta.forward_flops(*image)
    plan = build_plan(parts.llm, parts.encoders, Mesh.from_world(1, pipe=1), PlanOptions())
    assert mixes_of(plan) == ("example", "image-heavy", "video-heavy", "text-only")
    for sample in example_samples(plan, 8, 4096, mix="video-heavy"):
        assert all(len(item.shape) == 3 and item.encoder == "vision" for item in sample.items)
    assert any(sample.items for sample in example_samples(plan, 8, 4096, mix="video-heavy"))


def test_a_long_video_is_dealt_by_its_steps(model: Path, folder: Path) -> None:
    (meta,) = composed(model, folder, {})[1].encoders
    segments, rows = meta.measure((12, 24, 40))
    assert segments == (60,) * 6 and rows == 90 and meta.slices((12, 24, 40), 2) is None
    with pytest.raises(UserError, match="a video of 3 frames, of which a patch joins 2"):
        meta.measure((3, 24, 40))
    item = Item(0, 0, "vision", (12, 24, 40), segments, rows, ((5, 90),), seconds=0.5)
    parts = split_item(meta, item, 4)
    assert [(part.start, part.shape, part.rows, part.spans) for part in parts] == [
        (0, (8, 24, 40), 60, ((5, 60),)),
        (8, (4, 24, 40), 30, ((65, 30),)),
    ]
    image = Item(0, 1, "vision", (24, 40), *meta.measure((24, 40)), ((95, 15),))
    sample = SampleMeta(0, 200, 10, (item, image))
    (split,) = split_recordings([sample], EncoderCost((meta,)), 2, 120)
    assert [len(part.segments) for part in split.items] == [2, 2, 2, 1]
