"""Videos of Qwen3-VL: frames, sizes and times as its processors have them, runs of placeholders, refusals."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from data.frame_sampling import FrameSampling
from data.media import MediaHeader
from data.planned import Planned
from data.timed_videos import ClipSizing, spread
from models.families.qwen3_vl import qwen3_spelled
from omni_ds.errors import UserError
from tests.families import make_model
from tests.unit.test_model_videos import composed, opened, row
from tests.videos import numbered, write_video


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3_vl", tmp_path_factory.mktemp("model"))


def header(frames: int, fps: float, height: int = 100, width: int = 200) -> MediaHeader:
    return MediaHeader("video", height, width, times=np.arange(frames) / fps, fps=fps)


@pytest.mark.parametrize("frames", [1, 2, 3, 7, 48, 251, 5000])
@pytest.mark.parametrize("fps", [1.0, 10.0, 23.976, 60.0])
def test_frames_are_those_of_hf(frames: int, fps: float) -> None:
    limits = SimpleNamespace(fps=2.0, min_frames=4, max_frames=32)
    metadata = SimpleNamespace(total_num_frames=frames, fps=fps)
    expected = Qwen3VLVideoProcessor.sample_frames(limits, metadata)
    assert spread(frames, fps, FrameSampling(2.0, 4, 32, 2)).tolist() == expected.tolist()


@pytest.mark.parametrize("frames", [1, 5, 14, 90])
@pytest.mark.parametrize("fps", [4.0, 10.0, 29.97])
def test_times_are_those_of_hf(model: Path, tmp_path: Path, frames: int, fps: float) -> None:
    plan = composed(model, tmp_path, {})[1].media["vision"].plan(header(frames, fps))
    taken = spread(frames, fps, FrameSampling(2.0, 4, 768, 2)).tolist()
    expected = Qwen3VLProcessor._calculate_timestamps(None, taken, fps)
    assert plan.times == tuple(expected) and plan.shape[0] == 2 * len(expected)


def test_times_of_a_variable_rate_are_real(model: Path, tmp_path: Path) -> None:
    """Eight frames in 21 s, of which the last is shown from the 20th on: those nearest to even times."""
    times = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 20.0])
    uneven = MediaHeader("video", 24, 40, times=times, fps=8 / 21)
    plan = composed(model, tmp_path, {})[1].media["vision"].plan(uneven)
    assert plan.times == (1.5, 5.5, 13.0, 20.0)


def test_sizes_are_those_of_hf(model: Path, tmp_path: Path) -> None:
    """Bounds of all frames, and of one, as the video processor counts them."""
    processor = SimpleNamespace(
        size={"shortest_edge": 4096, "longest_edge": 200_000},
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        max_video_tokens=64,
    )
    for frames in (2, 9, 40):
        for capped in (False, True):
            processor.cap_pixels_per_frame = capped
            expected = Qwen3VLVideoProcessor.get_num_of_video_patches(processor, frames, 300, 500)
            media = composed(model, tmp_path, {})[1].media["vision"].by_modality["video"]
            media.sizing = ClipSizing(4096, 200_000, 64 * 64 if capped else 0)
            height, width = media._size(header(frames, 10.0, 300, 500), frames)
            assert (frames + frames % 2) // 2 * (height // 4) * (width // 4) == expected


def test_keys_bound_a_frame_and_all_of_them(model: Path, tmp_path: Path) -> None:
    def shape(**processor):
        return composed(model, tmp_path, processor)[1].media["vision"].plan(header(40, 10.0)).shape

    assert shape(video_total_pixels=8 * 1024)[1:] > shape(video_total_pixels=2 * 1024)[1:]
    assert shape(video_total_pixels=10**6, video_max_pixels=512)[1:] == (16, 32)
    with pytest.raises(UserError, match="set video_min_pixels and video_total_pixels"):
        shape(video_min_pixels=4096, video_total_pixels=512)


def test_the_text_has_a_run_for_each_step(model: Path, tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", numbered(30, 24, 40), [100 * n for n in range(30)])
    rows = [row("<video>?", videos=["a.mp4"]), row("<image><video>", videos=["a.mp4"], images=["a.png"])]
    Image.fromarray(numbered(1, 24, 40)[0]).save(tmp_path / "a.png")
    dataset = opened(model, tmp_path, rows)
    assert not dataset.skipped
    for number, place in ((0, 0), (1, 1)):
        item = dataset.meta(number).items[place]
        assert len(item.spans) == len(item.times) == item.shape[0] // 2 == 3
        assert sum(length for _, length in item.spans) == item.rows
        sample = dataset.encode(number)
        text = dataset.text.tokenizer.decode(sample.input_ids)
        pads = "<|video_pad|>" * item.spans[0][1]
        frames = "".join(f"<{t:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for t in item.times)
        assert f"<|vision_start|>{frames}<|vision_end|>" in text
        for start, length in item.spans:  # all rows of a step have one time
            at = sample.positions[0, start : start + length]
            assert (at == at[0]).all() and sample.positions[0, start - 1] == at[0] - 1


def test_what_stands_for_a_video() -> None:
    planned = Planned((4, 16, 16), times=(0.25, 1.75))
    tokenizer = SimpleNamespace(
        vision_start_token="<s>", vision_end_token="<e>", convert_ids_to_tokens=["<i>", "<v>"].__getitem__
    )
    spelled = qwen3_spelled(SimpleNamespace(video_token_id=1), tokenizer)
    assert spelled["video"](planned) == "<0.2 seconds><s><v><e><1.8 seconds><s><v><e>"


def test_a_text_with_the_placeholder_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"given.jsonl:1: text contains a placeholder token: '<\|video_pad\|>'"
    ):
        opened(model, tmp_path, [row("What is <|video_pad|>?")], on_error="raise")
