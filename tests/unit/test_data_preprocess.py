"""Shapes are planned from headers; arrays have these shapes and the values of HF's processors."""

import io

import numpy as np
import pytest
from PIL import Image
from transformers import WhisperFeatureExtractor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from data.errors import MediaError, RowError
from data.media import MediaRef, decode_audio, decode_image, media_ref, read_header
from data.preprocess import AudioPreprocess, ImagePreprocess, build_preprocess
from omni_ds.config import EncoderConfig
from omni_ds.errors import UserError
from tests.unit.data_helpers import flac, png

WHISPER = {"model_type": "whisper", "num_mel_bins": 16, "max_source_positions": 100}


def image(**values):
    return build_preprocess(
        "vision", EncoderConfig(config={}, modality="image", **values), {"image_size": 28}
    )


def audio(hf_config=WHISPER, **processor):
    section = EncoderConfig(config=WHISPER, modality="audio", processor=processor)
    return build_preprocess("audio", section, hf_config)


@pytest.mark.parametrize(("height", "width"), [(28, 28), (50, 31), (3, 200), (1, 1)])
def test_images_are_resized_to_the_tower(height, width, tmp_path):
    ref = media_ref("image", png(tmp_path / "a.png", height, width), tmp_path)
    preprocess = image()
    header = read_header(ref)
    assert (header.height, header.width) == (height, width)
    shape = preprocess.plan_shape(header)
    array = preprocess.load(ref, shape)
    assert shape == (28, 28) and array.shape == (3, 28, 28) and array.dtype == np.float32
    assert -1.1 < array.min() <= array.max() < 1.1
    assert preprocess.blank(shape).shape == array.shape


def test_a_checkpoint_s_processor_is_used(tmp_path):
    theirs = CLIPImageProcessorPil(size={"shortest_edge": 36}, crop_size={"height": 32, "width": 32})
    theirs.save_pretrained(tmp_path)
    ours = build_preprocess("vision", EncoderConfig(path=str(tmp_path), modality="image"), {"image_size": 99})
    ref = media_ref("image", png(tmp_path / "a.png", 50, 70), tmp_path)
    assert ours.plan_shape(read_header(ref)) == (32, 32)
    expected = theirs(Image.open(tmp_path / "a.png"), return_tensors="np")["pixel_values"][0]
    assert np.array_equal(ours.load(ref, (32, 32)), expected)


def test_a_processor_of_many_sizes_is_refused():
    with pytest.raises(UserError, match="images of one size"):
        ImagePreprocess(CLIPImageProcessorPil(size={"shortest_edge": 36}, do_center_crop=False), "x")


def test_rotation_by_exif_counts(tmp_path):
    picture = Image.fromarray(np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3))
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(tmp_path / "a.png", exif=exif)
    ref = media_ref("image", str(tmp_path / "a.png"), tmp_path)
    header = read_header(ref)
    assert (header.height, header.width) == (6, 4)
    assert np.array_equal(np.asarray(decode_image(ref)), np.rot90(np.asarray(picture), -1))


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "I;16", "CMYK"])
def test_every_colour_mode_becomes_rgb(mode, tmp_path):
    if mode == "I;16":
        picture = Image.fromarray(np.full((5, 5), 0x8000, dtype=np.uint16))
    else:
        picture = Image.new("RGB", (5, 5), (128, 128, 128)).convert(mode)
    picture.save(tmp_path / "a.tif")
    decoded = np.asarray(decode_image(media_ref("image", str(tmp_path / "a.tif"), tmp_path)))
    assert decoded.shape == (5, 5, 3)
    assert mode == "1" or abs(int(decoded.mean()) - 128) <= 2


def test_damaged_media(tmp_path):
    content = (tmp_path / "a.png", png(tmp_path / "a.png", 200, 200))[0].read_bytes()
    truncated = MediaRef("image", content=content[: len(content) // 2])
    assert read_header(truncated).height == 200
    with pytest.raises(MediaError, match="cannot be decoded"):
        image().load(truncated, (28, 28))
    with pytest.raises(MediaError, match="cannot be read"):
        read_header(MediaRef("image", content=b"no image"))
    with pytest.raises(MediaError, match="cannot be read"):
        read_header(MediaRef("audio", content=b"no sound"))
    for modality in ("image", "audio"):
        with pytest.raises(MediaError, match="file not found"):
            read_header(media_ref(modality, "missing", tmp_path))
    with pytest.raises(RowError, match="array of unknown form"):
        read_header(MediaRef("image", array=np.zeros((3, 4), dtype=np.float32)))


@pytest.mark.parametrize(
    ("samples", "rate"),
    [(100, 16000), (160, 16000), (8000, 16000), (12345, 44100), (5001, 8000), (48000, 48000)],
)
def test_clips_keep_their_duration(samples, rate, tmp_path):
    ref = media_ref("audio", flac(tmp_path / "a.flac", samples, rate), tmp_path)
    preprocess = audio()
    shape = preprocess.plan_shape(read_header(ref))
    frames = max(1, -(-samples * 16000 // rate) // 160)
    assert shape == (frames,)
    array = preprocess.load(ref, shape)
    assert array.shape == (16, frames) and array.dtype == np.float32 and np.isfinite(array).all()


def test_frames_are_whisper_s(tmp_path):
    ref = media_ref("audio", flac(tmp_path / "a.flac", 20000), tmp_path)
    preprocess = audio()
    theirs = WhisperFeatureExtractor(feature_size=16)(
        decode_audio(ref, 16000), sampling_rate=16000, padding="do_not_pad", return_tensors="np"
    )["input_features"][0]
    assert np.allclose(preprocess.load(ref, preprocess.plan_shape(read_header(ref))), theirs, atol=1e-6)


def test_pad_to_window_is_hf_s_padding(tmp_path):
    ref = media_ref("audio", flac(tmp_path / "a.flac", 20000), tmp_path)
    section = EncoderConfig(config=WHISPER, modality="audio", processor={"pad_to_window": True})
    preprocess = build_preprocess("audio", section, WHISPER | {"max_source_positions": 1500})
    shape = preprocess.plan_shape(read_header(ref))
    theirs = WhisperFeatureExtractor(feature_size=16)(
        decode_audio(ref, 16000), sampling_rate=16000, return_tensors="np"
    )["input_features"][0]
    assert shape == (3000,)
    assert np.allclose(preprocess.load(ref, shape), theirs, atol=1e-6)


def test_resampling_keeps_the_tone():
    time = np.arange(44100) / 44100
    tone = np.stack([np.sin(2 * np.pi * 1000 * time)] * 2, axis=1)
    samples = decode_audio(MediaRef("audio", array=tone, sampling_rate=44100), 16000)
    spectrum = np.abs(np.fft.rfft(samples))
    assert len(samples) == 16000 and spectrum.argmax() == 1000
    assert np.abs(samples[100:-100]).max() == pytest.approx(1, abs=0.01)


def test_what_is_decoded_is_cut_or_padded_to_the_plan(tmp_path):
    ref = media_ref("audio", flac(tmp_path / "a.flac", 3200), tmp_path)
    preprocess = audio()
    whole = preprocess.load(ref, (20,))
    assert preprocess.load(ref, (7,)).shape == (16, 7)
    longer = preprocess.load(ref, (90,))
    assert longer.shape == (16, 90) and np.allclose(longer[:, :15], whole[:, :15], atol=1e-2)


def test_long_clips_are_refused(tmp_path):
    buffer = io.BytesIO()
    import soundfile

    soundfile.write(buffer, np.zeros(16000 * 3), 16000, format="WAV")
    header = read_header(MediaRef("audio", content=buffer.getvalue()))
    assert audio(max_seconds=3.0).plan_shape(header) == (300,)
    with pytest.raises(MediaError, match="longer than max_seconds"):
        audio(max_seconds=2.5).plan_shape(header)


@pytest.mark.parametrize(
    ("values", "hf_config", "message"),
    [
        ({"sampling_rate": 8000}, WHISPER, "sampling_rate is 8000"),
        ({}, WHISPER | {"num_mel_bins": 80}, "takes 80 mel bins"),
        ({"pad_to_window": True}, WHISPER, "a window of the encoder has 200"),
    ],
)
def test_extractor_and_encoder_must_agree(values, hf_config, message, tmp_path):
    WhisperFeatureExtractor(feature_size=16).save_pretrained(tmp_path)
    section = EncoderConfig(path=str(tmp_path), modality="audio", processor=values)
    with pytest.raises(UserError, match=message):
        build_preprocess("audio", section, hf_config)


def test_blank_audio():
    assert AudioPreprocess(WhisperFeatureExtractor(feature_size=16), 30.0).blank((7,)).shape == (16, 7)
