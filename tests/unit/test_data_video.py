"""Videos: times from packets, rotation, frames by number, sampling, sound."""

import io
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import data.video
from data.audio_track import decode_audio_track
from data.errors import MediaError, RowError
from data.frame_sampling import FrameSampling, evenly, nearest, sample_frames
from data.media import MediaHeader, decode_audio, media_ref, read_header
from data.video import Video, decode_frames, turned, video_header
from tests.videos import number_of, numbered, write_video

VFR = [0, 30, 100, 250, 900, 950, 1000, 2000, 2040]


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """40 frames of 25 a second, a key frame every 5."""
    path = tmp_path_factory.mktemp("videos") / "steady.mp4"
    return write_video(path, numbered(40), [40 * n for n in range(40)], keys=5)


def ref(value, folder=None):
    return media_ref("video", value if isinstance(value, list | dict | bytes) else str(value), folder)


def in_memory(*args, **options) -> bytes:
    return write_video(io.BytesIO(), *args, **options).getvalue()


def test_a_header_says_when_frames_are_shown(steady, tmp_path):
    header = video_header(ref(steady, tmp_path))
    assert (header.height, header.width, header.fps) == (16, 24, 25.0)
    assert header.times == pytest.approx(np.arange(40) / 25)
    assert read_header(ref(steady, tmp_path)).fps == 25.0


@pytest.mark.parametrize("form", ["mp4", "matroska"])
def test_times_of_a_variable_rate(form):
    content = in_memory(numbered(9), VFR, form=form)
    header = video_header(ref(content))
    assert header.times * 1000 == pytest.approx(VFR, abs=1)
    assert header.fps == pytest.approx(9 / 2.04, rel=0.15)  # how long the last frame lasts, the file says
    assert [number_of(image, 9) for image in decode_frames(ref(content), range(9))] == list(range(9))


@pytest.mark.parametrize("form", ["mp4", "matroska", "mpegts", "avi"])
def test_frames_by_number(form, monkeypatch):
    content = in_memory(numbered(40), [40 * n for n in range(40)], keys=5, form=form)
    for wanted in ([0], [39], [0, 39], [3, 3, 17, 18, 31], [12, 33], list(range(40))):
        found = [number_of(image, 40) for image in decode_frames(ref(content), wanted)]
        assert found == wanted, form


def test_only_what_is_needed_is_decoded(steady, tmp_path, monkeypatch):
    converted, decoded, original = [], [], data.video._passed

    def counting(frames, *rest, **options):
        return original((decoded.append(frame.pts) or frame for frame in frames), *rest, **options)

    def picture(frame):
        converted.append(frame.pts)
        return Image.new("RGB", (1, 1))

    monkeypatch.setattr(data.video, "_picture", picture)
    monkeypatch.setattr(data.video, "_passed", counting)
    decode_frames(ref(steady, tmp_path), [2, 36])
    assert len(converted) == 2 and len(decoded) <= 5


@pytest.mark.parametrize(
    ("rotation", "hflip"), [(0, False), (90, False), (-90, False), (180, False), (0, True), (90, True)]
)
def test_rotation(rotation, hflip):
    content = in_memory(numbered(4), [0, 40, 80, 120], rotation=rotation, hflip=hflip)
    header = video_header(ref(content))
    expected = Image.fromarray(numbered(4)[1]).rotate(rotation, expand=True)
    if hflip:
        expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    (found,) = decode_frames(ref(content), [1])
    assert found.size == expected.size == (header.width, header.height)
    assert np.abs(np.asarray(found, int) - np.asarray(expected, int)).max() <= 3


def test_the_eight_matrices_differ():
    image = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    ones = [(a, 0, 0, d) for a in (1, -1) for d in (1, -1)] + [(0, b, c, 0) for b in (1, -1) for c in (1, -1)]
    assert len({(turned(image, m).size, turned(image, m).tobytes()) for m in ones}) == 8


def test_lists_of_frames(tmp_path):
    for number, frame in enumerate(numbered(5)):
        Image.fromarray(frame).save(tmp_path / f"{number}.png")
    names = [f"{number}.png" for number in range(5)]
    for value in (
        names,
        {"frames": names, "fps": 2},
        {"frames": [Image.open(tmp_path / name) for name in names], "fps": 2},
        {"array": np.stack(numbered(5)), "fps": 2},
        {"frames": [(tmp_path / name).read_bytes() for name in names], "fps": 2},
    ):
        video = Video(media_ref("video", value, tmp_path))
        header = video.header
        assert (header.height, header.width, len(header.times), header.listed) == (16, 24, 5, True)
        assert header.fps == (0.0 if value is names else 2.0)
        assert [number_of(image, 5) for image in video.frames([0, 2, 4, 4])] == [0, 2, 4, 4]
    assert "5 frames" in str(media_ref("video", names, tmp_path))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "video without frames"),
        ({"frames": ["a.png"], "fps": -1}, "not a positive number"),
        ({"path": "a.mp4", "fps": 2}, "fps of a video file"),
        ({"width": 3}, "video of unknown form"),
        (7, "video of unknown form"),
    ],
)
def test_forms_that_are_refused(value, reason, tmp_path):
    with pytest.raises(RowError, match=reason):
        media_ref("video", value, tmp_path)


def test_files_that_cannot_be_read(tmp_path, steady):
    (tmp_path / "text.mp4").write_text("no video")
    whole = steady.read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    import soundfile

    soundfile.write(tmp_path / "a.wav", np.zeros(100), 16000)
    for name, reason in [
        ("none.mp4", "video file not found"),
        ("text.mp4", "video file cannot be read"),
        ("cut.mp4", "video file cannot be read"),
        ("a.wav", "video file has no pictures"),
    ]:
        with pytest.raises(MediaError, match=reason):
            video_header(ref(tmp_path / name, tmp_path))


def test_a_damaged_frame_is_an_error(steady):
    damaged = bytearray(steady.read_bytes())
    at, end = damaged.index(b"mdat") + 4, damaged.index(b"moov")
    middle = (at + end) // 2
    damaged[middle : end - 8] = b"\xff" * (end - 8 - middle)
    assert len(video_header(ref(bytes(damaged))).times) == 40
    with pytest.raises(MediaError, match="video file cannot be"):
        decode_frames(ref(bytes(damaged)), range(40))


def header_of(total: int, fps: float, listed: bool = False) -> MediaHeader:
    rate = fps or 1.0
    return MediaHeader("video", 8, 8, times=np.arange(total) / rate, fps=fps, listed=listed)


def test_sampling_counts_frames():
    sampling = FrameSampling(2.0, 4, 8, 2)
    taken, rate = sample_frames(header_of(250, 25.0), sampling)  # 10 seconds: 20, of which 8
    assert len(taken) == 8 and rate == pytest.approx(0.8) and taken[0] == 0 and taken[1] == 31
    taken, rate = sample_frames(header_of(75, 25.0), sampling)  # 3 seconds
    assert len(taken) == 6 and rate == 2.0
    taken, _ = sample_frames(header_of(25, 25.0), sampling)  # at least four
    assert len(taken) == 4
    taken, _ = sample_frames(header_of(3, 25.0), sampling)  # a multiple of two
    assert taken.tolist() == [0, 1]
    taken, rate = sample_frames(header_of(1, 25.0), sampling)
    assert taken.tolist() == [0] and rate == 25.0


def test_sampling_of_a_variable_rate_takes_the_nearest():
    times = np.array(VFR) / 1000
    header = MediaHeader("video", 8, 8, times=times, fps=9 / 2.08)
    taken, rate = sample_frames(header, FrameSampling(2.0, 4, 768, 2))
    # frames 0, 2, 4 and 6 of equal duration would be shown at 0, 0.46, 0.92 and 1.39 s
    assert rate == pytest.approx(4 / 2.08) and taken.tolist() == [0, 3, 4, 6]
    assert nearest(times, np.array([-1.0, 0.06, 0.065, 1.5, 9.0])).tolist() == [0, 1, 1, 6, 8]


def test_all_frames_of_a_list_are_taken():
    sampling = FrameSampling(2.0, 4, 8, 2)
    for fps in (0.0, 1.0, 2.0):
        taken, rate = sample_frames(header_of(5, fps, listed=True), sampling)
        assert taken.tolist() == list(range(5)) and rate == (fps or 2.0)
    taken, _ = sample_frames(header_of(20, 0.0, listed=True), sampling)
    assert len(taken) == 8
    taken, rate = sample_frames(header_of(20, 4.0, listed=True), FrameSampling(2.0, 4, 768, 2))
    assert taken.tolist() == list(range(0, 20, 2)) and rate == 2.0


def test_sampling_equals_hf(monkeypatch):
    """transformers' own method, whose module asks for torchvision that it does not need for this."""
    import transformers.video_processing_utils  # noqa: F401  before it can look for torchvision
    from transformers.video_utils import VideoMetadata

    parts = "torchvision", "transforms", "v2", "functional"
    for count in range(1, 5):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(parts[count - 1]))
        if count > 1:
            parent = sys.modules[".".join(parts[: count - 1])]
            monkeypatch.setattr(parent, parts[count - 1], sys.modules[".".join(parts[:count])], raising=False)
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    hf = Qwen2VLVideoProcessor.sample_frames
    rng = np.random.default_rng(0)
    values = SimpleNamespace(num_frames=None, fps=None, temporal_patch_size=2, min_frames=4, max_frames=768)
    for _ in range(200):
        total, most = int(rng.integers(2, 3000)), int(rng.integers(4, 200))
        fps, wanted = float(rng.choice([24, 25, 29.97, 30, 60])), float(rng.choice([0.5, 1, 2, 3.3]))
        known = VideoMetadata(total_num_frames=total, fps=fps)
        theirs = hf(values, known, fps=wanted, max_frames=most)
        assert evenly(total, fps, FrameSampling(wanted, 4, most, 2)).tolist() == theirs.tolist()


@pytest.mark.parametrize("form", ["mp4", "matroska"])
def test_the_sound_of_a_video(form):
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(24000) / 16000)
    content = in_memory(numbered(4), [0, 500, 1000, 1460], form=form, sound=wave)
    video = ref(content)
    header = read_header(video.sound())
    assert header.modality == "audio" and header.sampling_rate == 16000
    assert header.samples == pytest.approx(24000, abs=2100)
    samples = decode_audio_track(video, 16000)
    assert samples.dtype == np.float32 and len(samples) == pytest.approx(header.samples, abs=2100)
    assert np.abs(samples).max() == pytest.approx(0.5, abs=0.1)
    spectrum = np.abs(np.fft.rfft(samples[:16000]))
    assert abs(int(spectrum.argmax()) - 440) <= 2
    assert len(decode_audio(video.sound(), 8000)) == pytest.approx(len(samples) / 2, abs=2)


def test_a_video_without_sound(steady, tmp_path):
    with pytest.raises(MediaError, match="video file has no sound"):
        read_header(ref(steady, tmp_path).sound())
    with pytest.raises(MediaError, match="video file has no sound"):
        decode_audio_track(ref(steady, tmp_path), 16000)
