"""Images at native resolution: sizes by rule, counts from headers, pixels as HF's processors make them."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoConfig
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from data.errors import MediaError
from data.media import MediaHeader, MediaRef, decode_image, media_ref, read_header
from data.native import NativeImagePreprocess, sized
from data.preprocess import ImagePreprocess, build_preprocess
from omni_ds.checkpoint.hf_code import media_omni
from omni_ds.config import EncoderConfig
from omni_ds.errors import UserError
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.image_size import Sizing, smart_size
from tests.unit.model_helpers import VITS, encoder_section

SIDES = st.integers(1, 20000)
BLOCKS = st.sampled_from([4, 14, 16, 28, 32])


def bounds(block):
    """Bounds of which at least one number of blocks lies between."""
    low = st.none() | st.integers(1, 3_000_000)
    high = st.none() | st.integers(block**2, 6_000_000)
    return st.tuples(low, high).filter(
        lambda pair: pair[1] is None or pair[1] // block**2 * block**2 >= (pair[0] or 1)
    )


@given(height=SIDES, width=SIDES, data=st.data(), block=BLOCKS)
def test_sides_are_multiples_and_the_area_is_in_bounds(height, width, data, block):
    low, high = data.draw(bounds(block))
    rows, columns = smart_size(height, width, block, low, high)
    assert rows % block == columns % block == 0 and min(rows, columns) >= block
    assert high is None or rows * columns <= high
    if low is not None and (high is None or high >= 4 * low):
        assert rows * columns >= low
    assert (rows, columns) == media_omni.smart_size(height, width, block, low, high)
    assert (columns, rows) == smart_size(width, height, block, low, high)
    # a size that is legal stays as it is
    assert smart_size(rows, columns, block, low, high) == (rows, columns) or (low and rows * columns < low)


@given(height=SIDES, width=SIDES, data=st.data(), block=BLOCKS)
@example(height=1080, width=1920, data=None, block=28)
def test_sizes_are_those_of_qwen2_vl_where_it_keeps_the_bounds(height, width, data, block):
    low, high = (56 * 56, 28 * 28 * 1280) if data is None else data.draw(bounds(block))
    assume(2 * min(height, width) > block and max(height, width) <= 200 * min(height, width))
    theirs = smart_resize(height, width, block, low or 1, high or 10**12)
    if (low or 1) <= theirs[0] * theirs[1] <= (high or 10**12):
        assert smart_size(height, width, block, low, high) == theirs


def build(name, factor=1, path=None, **bounds):
    """(preprocessing, plan's numbers) of a tower with patches of 4."""
    hf = AutoConfig.for_model(**VITS[name]).to_dict()
    projector = {"reduction": "pixel_shuffle", "factor": factor} if factor > 1 else {}
    section = encoder_section(None if path else VITS[name], projector=projector, processor=bounds)
    if path:
        section = section.model_copy(update={"path": str(path)})
    return build_preprocess("v", section, hf), EncoderMeta.from_config("v", section, hf, 24)


CASES = [
    ("siglip", 2, {"min_pixels": 64, "max_pixels": 1024}),
    ("clip", 1, {"max_pixels": 640}),
    ("dinov2-registers", 3, {"min_pixels": 500}),
    ("naflex", 2, {"max_pixels": 999}),
    ("naflex", 1, {}),
    ("naflex", 2, {}),
]
SIZES = [(1, 1), (1, 90), (16, 16), (33, 17), (60, 200), (7, 5)]


@pytest.mark.parametrize(("name", "factor", "limits"), CASES)
def test_counts_from_headers_are_those_of_what_is_decoded(name, factor, limits, tmp_path):
    preprocess, meta = build(name, factor, **limits)
    assert meta.native and meta.max_pixels == limits.get("max_pixels", 0)
    for height, width in SIZES:
        path = tmp_path / f"{height}x{width}.png"
        Image.new("L", (width, height), 99).save(path)
        ref = media_ref("image", str(path), tmp_path)
        shape = preprocess.plan_shape(read_header(ref))
        (tokens,), rows = meta.measure(shape)
        array = preprocess.load(ref, shape)
        assert array.shape == (3, *shape) == preprocess.blank(shape).shape and array.dtype == np.float32
        assert tokens == meta.prefix + array[0].size // 16
        assert rows == array[0].size // (4 * factor) ** 2 > 0
        assert np.ptp(array) < 1e-6  # grey stays grey


def test_naflex_without_bounds_is_hf_s_processor(tmp_path):
    theirs = Siglip2ImageProcessorPil(patch_size=4, max_num_patches=37, image_mean=[0.4] * 3)
    theirs.save_pretrained(tmp_path)
    preprocess, _ = build("naflex", path=tmp_path)
    assert preprocess.sizing == Sizing(4, max_blocks=37)
    for height, width in SIZES:
        array = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        expected = theirs(Image.fromarray(array), return_tensors="np")
        shape = preprocess.plan_shape(MediaHeader("image", height=height, width=width))
        assert tuple(4 * expected["spatial_shapes"][0]) == shape
        ours = preprocess.load(MediaRef("image", array=array), shape)
        flat = ours.reshape(3, shape[0] // 4, 4, shape[1] // 4, 4).transpose(1, 3, 2, 4, 0).reshape(-1, 48)
        assert np.abs(flat - expected["pixel_values"][0][: len(flat)]).max() <= 1e-6


@pytest.mark.parametrize("resample", [2, 3])
def test_pixels_are_those_of_hf_s_processor_at_that_size(resample):
    theirs = CLIPImageProcessorPil(resample=resample, do_center_crop=False)
    preprocess = NativeImagePreprocess(theirs, Sizing(14, 14 * 14 * 6, 14 * 14 * 20))
    for height, width in SIZES:
        array = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
        shape = preprocess.plan_shape(MediaHeader("image", height=height, width=width))
        size = {"height": shape[0], "width": shape[1]}
        expected = theirs(Image.fromarray(array), size=size, return_tensors="np")["pixel_values"][0]
        ours = preprocess.load(MediaRef("image", array=array), shape)
        assert ours.shape == expected.shape and np.abs(ours - expected).max() <= 1e-6


def test_an_image_that_changed_since_it_was_indexed_fails():
    preprocess, _ = build("siglip", max_pixels=1024)
    ref = MediaRef("image", array=np.zeros((16, 40), dtype=np.uint8))
    assert preprocess.load(ref, (16, 40)).shape == (3, 16, 40)
    with pytest.raises(MediaError, match="another size than when it was indexed"):
        preprocess.load(ref, (16, 44))


def test_without_bounds_images_have_one_size():
    preprocess, meta = build("clip")
    assert isinstance(preprocess, ImagePreprocess) and not meta.native
    shortest_edge = CLIPImageProcessorPil(size={"shortest_edge": 36}, do_center_crop=False)
    assert sized(Sizing(4, max_pixels=64), 100, 100) == (8, 8)
    with pytest.raises(UserError, match="set one of the keys"):
        ImagePreprocess(shortest_edge, "x")


def test_the_towers_own_grid_need_not_divide():
    """27 x 27 patches do not divide by 2; natively every image does."""
    config = VITS["siglip"] | {"image_size": 384, "patch_size": 14}
    projector = {"reduction": "pixel_shuffle", "factor": 2}
    section = EncoderConfig(config=config, modality="image", projector=projector)
    with pytest.raises(UserError, match="does not divide"):
        EncoderMeta.from_config("v", section, config, 24)
    section = section.model_copy(
        update={"processor": section.processor.model_copy(update={"max_pixels": 9999})}
    )
    assert EncoderMeta.from_config("v", section, config, 24).measure((84, 112)) == ((48,), 12)


@pytest.mark.parametrize(
    ("factor", "limits", "message"),
    [
        (2, {"max_pixels": 63}, "blocks of 8 x 8 pixels .*; use at least 64"),
        (1, {"min_pixels": 17, "max_pixels": 31}, "max_pixels: 31 and min_pixels 17 leave .* at least 32"),
        (5, {}, "5 x 5 patches are more than the 16"),
    ],
)
def test_bounds_without_room_are_refused(factor, limits, message):
    with pytest.raises(UserError, match=message):
        build("naflex", factor, **limits)


def picture():
    return Image.fromarray(np.random.default_rng(2).integers(0, 255, (8, 12, 3), dtype=np.uint8))


def late_exif(exif):
    """A PNG whose EXIF comes after its pixels."""
    buffer = io.BytesIO()
    picture().save(buffer, "PNG")
    raw, body = buffer.getvalue(), exif.tobytes().removeprefix(b"Exif\0\0")
    end = raw.rindex(b"IEND") - 4
    chunk = struct.pack(">I", len(body)) + b"eXIf" + body + struct.pack(">I", zlib.crc32(b"eXIf" + body))
    return raw[:end] + chunk + raw[end:]


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("kind", ["PNG", "late PNG", "JPEG", "TIFF", "WEBP"])
def test_sizes_in_headers_are_those_of_the_turned_image(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    if kind != "late PNG":
        picture().save(buffer, kind, exif=exif)
    ref = MediaRef("image", content=late_exif(exif) if kind == "late PNG" else buffer.getvalue())
    header, decoded = read_header(ref), decode_image(ref)
    assert (header.height, header.width) == (decoded.height, decoded.width)
    assert decoded.size == ((8, 12) if orientation in (6, 8) else (12, 8))


@pytest.mark.parametrize("mode", ["P", "LA", "1", "RGBA", "I;16"])
def test_pil_images_of_every_mode_become_rgb(mode, tmp_path):
    image = Image.new("RGB", (5, 4), (128, 128, 128)).convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.fromarray(np.full((4, 5), 0x8000, dtype=np.uint16))
    ref = media_ref("image", image, tmp_path)
    decoded = np.asarray(decode_image(ref))
    assert decoded.shape == (4, 5, 3)
    assert mode == "1" or abs(int(decoded.mean()) - 128) <= 2
