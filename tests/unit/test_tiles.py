"""Images as tiles (LLaVA-OneVision, InternVL): counts and pixels are HF's, parts are those of the whole."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor, InternVLConfig, LlavaOnevisionConfig
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from data.index import open_dataset
from data.media import MediaHeader, MediaRef
from models.multimodal import read_model
from omni_ds.composition import complete, read_composition
from omni_ds.config import validate
from omni_ds.errors import UserError
from omni_ds.plan.long_short import split_item
from omni_ds.plan.sample import Item
from tests.families import make_model, model_config, write_rows

BUILT = {}


def built(family: str, folder: Path):
    """(folder, composition) of a tiny checkpoint, made once."""
    if family not in BUILT:
        model = make_model(family, folder / family)
        config = complete(validate(model_config(model, folder / "rows.jsonl", folder)))
        BUILT[family] = model, read_composition(config)
    return BUILT[family]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def pictures(count: int) -> list[Image.Image]:
    rng = np.random.default_rng(1)
    sizes = [(5, 90), (90, 5), (16, 16), (48, 48), (17, 31)]
    sizes += [tuple(int(x) for x in rng.integers(2, 99, 2)) for _ in range(count - len(sizes))]
    return [Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sizes]


def ref(image: Image.Image) -> MediaRef:
    return MediaRef("image", array=np.asarray(image))


def header(image: Image.Image, siblings: int = 1) -> MediaHeader:
    return MediaHeader("image", image.height, image.width, siblings=siblings)


def test_rows_of_onevision_are_as_many_as_its_processor_counts(tmp_path: Path) -> None:
    """With the sizes of the published models, for images of all proportions."""
    from data.tiles import OneVisionPreprocess

    meta, _ = counted(LlavaOnevisionConfig(), tmp_path)
    pinpoints = LlavaOnevisionConfig().image_grid_pinpoints
    images = SimpleNamespace(image_grid_pinpoints=pinpoints, size={"height": 384, "width": 384})
    processor = object.__new__(LlavaOnevisionProcessor)
    processor.image_processor, processor.num_image_tokens = images, 27 * 27
    processor.vision_aspect_ratio = "anyres_max_9"
    preprocess, rng, resized = OneVisionPreprocess(images, 384), random.Random(0), 0
    for _ in range(3000):
        height, width = (max(1, int(10 ** rng.uniform(0, 3.7))) for _ in range(2))
        shape = preprocess.plan_shape(MediaHeader("image", height, width))
        assert meta.measure(shape)[1] == processor._get_number_of_features(height, width, 384, 384), shape
        picture = meta.picture(shape)
        resized += picture.lines < shape[0] * 27 - 2 * picture.top
    assert 100 < resized < 2900


def test_pixels_of_onevision_are_hf_s(folder: Path) -> None:
    model, parts = built("llava_onevision", folder)
    ours, hf = parts.media["vision"], AutoImageProcessor.from_pretrained(model, backend="pil")
    several = pictures(12)
    together = hf([several], return_tensors="np")["pixel_values"]
    for image, base in zip(several, together, strict=True):
        shape = ours.plan_shape(header(image))
        alone = hf([[image]], return_tensors="np")["pixel_values"][0]
        assert len(alone) == parts.encoders[0].tiles(shape)
        assert np.array_equal(ours.load(ref(image), shape), alone.transpose(1, 0, 2, 3))
        shape = ours.plan_shape(header(image, siblings=12))
        assert shape == (0, 0, image.height, image.width)
        assert np.array_equal(ours.load(ref(image), shape), base.transpose(1, 0, 2, 3))
        assert ours.blank(shape).shape == (3, 1, 16, 16)


def test_pixels_of_internvl_are_hf_s(folder: Path) -> None:
    model, parts = built("internvl", folder)
    ours, hf = parts.media["vision"], AutoImageProcessor.from_pretrained(model, backend="pil")
    seen = set()
    for image in pictures(20):
        made = hf(image, crop_to_patches=True, return_tensors="np")
        shape = ours.plan_shape(header(image, siblings=3))
        assert shape == (int(made["num_patches"][0]), 16, 16)
        assert np.array_equal(ours.load(ref(image), shape), made["pixel_values"].transpose(1, 0, 2, 3))
        seen.add(shape[0])
    assert {1, 6} <= seen


@pytest.mark.parametrize(
    "config",
    [
        LlavaOnevisionConfig(),
        InternVLConfig(),
        InternVLConfig(
            vision_config={
                "norm_type": "rms_norm",
                "use_qk_norm": True,
                "attention_bias": True,
                "use_mask_token": True,
                "use_mean_pooling": False,
            }
        ),
    ],
    ids=["onevision", "internvl", "internvl_other"],
)
def test_parameters_are_counted_as_hf_s(config, tmp_path: Path) -> None:
    meta, model = counted(config, tmp_path)
    wanted = {"tower": 0, "projector": 0}
    for name, parameter in model.named_parameters():
        if "vision_tower" in name:
            wanted["tower"] += parameter.numel()
        elif "projector" in name or "image_newline" in name:
            wanted["projector"] += parameter.numel()
    assert (meta.tower_parameters, meta.projector_parameters) == tuple(wanted.values())


def counted(config, folder: Path):
    """(EncoderMeta, HF model on the meta device) of a checkpoint's config.json."""
    config.save_pretrained(folder)
    full = complete(validate(model_config(folder, folder / "rows.jsonl", folder)))
    return read_composition(full, processors=False).encoders[0], read_model(full.omni.model).model


def test_tiles_of_internvl_may_be_dealt(folder: Path) -> None:
    meta = built("internvl", folder)[1].encoders[0]
    shape = (5, 16, 16)
    segments, rows = meta.measure(shape)
    whole = Item(0, 0, "vision", shape, segments, rows, ((7, 12), (30, 8)))
    parts = split_item(meta, whole, 2)
    assert [(part.start, part.shape[0], part.rows) for part in parts] == [(0, 2, 8), (2, 2, 8), (4, 1, 4)]
    assert [part.spans for part in parts] == [((7, 8),), ((15, 4), (30, 4)), ((34, 4),)]


def test_tiles_of_onevision_stay_together(folder: Path) -> None:
    meta = built("llava_onevision", folder)[1].encoders[0]
    assert not meta.segments_per_slice
    assert not meta.sliceable


def opened(model: Path, folder: Path, question: str, **columns):
    write_rows(folder, 3)
    path = folder / "given.jsonl"
    talk = [{"role": "user", "content": question}, {"role": "assistant", "content": "two"}]
    path.write_text(json.dumps({"messages": talk, **columns}) + "\n")
    config = complete(validate(model_config(model, path, folder, data={"on_error": "raise"})))
    parts = read_composition(config)
    metas = {meta.name: meta for meta in parts.encoders}
    return open_dataset(
        config.omni.data.train, config.omni.data, parts.text, parts.media, metas, builder=True
    )


REFUSED = {
    "text contains a placeholder token": ("What is <IMG_CONTEXT>?", {}),
    "more <image> tags than images": ("<image><image>?", {"images": ["1-0.png"]}),
    "image file not found": ("<image>?", {"images": ["none.png"]}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_row_is_refused_with_its_place(reason: str, folder: Path, tmp_path: Path) -> None:
    model, _ = built("internvl", folder)
    question, columns = REFUSED[reason]
    with pytest.raises(UserError, match=f"given.jsonl:1: {reason}"):
        opened(model, tmp_path, question, **columns)


def test_what_an_image_is_surrounded_by_is_in_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    dataset = opened(built("internvl", folder)[0], tmp_path, "Say <img> of <image>.", images=["1-0.png"])
    ids, tokenizer = dataset.encode(0).input_ids.tolist(), dataset.text.tokenizer
    first, row, last = tokenizer.convert_tokens_to_ids(["<img>", "<IMG_CONTEXT>", "</img>"])
    start = ids.index(first)
    assert ids.count(first) == 1  # the other one is text
    assert ids[start + 1 : ids.index(last)] == [row] * dataset.meta(0).items[0].rows
    assert dataset.meta(0).items[0].spans == ((start + 1, dataset.meta(0).items[0].rows),)


WRONG = {
    "image_grid_pinpoints": ("llava_onevision", {"image_grid_pinpoints": [[16, 32]]}),
    "squares of 16 pixels": ("internvl", {"size": {"height": 32, "width": 32}}),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_processor_of_another_checkpoint_is_refused(message: str, tmp_path: Path) -> None:
    family, change = WRONG[message]
    model = make_model(family, tmp_path / "model")
    file = model / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    config = complete(validate(model_config(model, tmp_path / "rows.jsonl", tmp_path)))
    with pytest.raises(UserError, match=message):
        read_composition(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlavaOnevisionConfig(vision_aspect_ratio="anyres"), "vision_aspect_ratio 'anyres'"),
        (LlavaOnevisionConfig(vision_feature_layer=[-1, -2]), "joins several layers"),
        (InternVLConfig(vision_feature_select_strategy="full"), "keeps the class token"),
        (InternVLConfig(downsample_ratio=0.3), "downsample_ratio 0.3"),
    ],
)
def test_what_is_not_built_is_refused(config, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        counted(config, tmp_path)
