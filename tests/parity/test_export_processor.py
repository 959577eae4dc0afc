"""The exported processor makes of a chat what training makes of it, in a process without this repository."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from data.media import MediaHeader, MediaRef
from data.placeholders import add_placeholders
from data.rows import RowReader
from data.text import TextProcessor
from omni_ds.config import ProcessorConfig
from tests.parity.export_support import LLM, Case, Reference, audio, image

LLAMA = LLM | {"model_type": "llama"}


def native(factor, model_type="siglip_vision_model", **bounds):
    reduction = "pixel_shuffle" if factor > 1 else "none"
    processor = ProcessorConfig(**bounds)
    return image(model_type=model_type, reduction=reduction, factor=factor, processor=processor)


CASES = [
    Case("both", LLAMA, {"vision": image(reduction="pixel_shuffle", factor=2), "audio": audio()}),
    Case("padded", LLAMA, {"ear": audio(factor=3, pad_to_window=True)}),
    Case("prefix", LLAMA, {"eye": image(model_type="dinov2_with_registers", feature_select="full")}),
    Case("llava", LLAMA, {"eye": image(model_type="clip_vision_model")}),
    Case("llava_full", LLAMA, {"eye": image(model_type="clip_vision_model", feature_select="full")}),
    Case("llava_siglip", LLAMA, {"eye": image()}),
    Case("text", LLAMA),
    Case("native", LLAMA, {"eye": native(2, min_pixels=14 * 14 * 4, max_pixels=14 * 14 * 9)}),
    Case("native_clip", LLAMA, {"eye": native(1, "clip_vision_model", max_pixels=1500)}),
    Case("native_dino", LLAMA, {"eye": native(2, "dinov2_with_registers", max_pixels=1500)}),
    Case("naflex", LLAMA, {"eye": native(1, "siglip2_vision_model")}),
    Case("naflex_bounds", LLAMA, {"eye": native(2, "siglip2_vision_model", min_pixels=2000)}),
]

PROBE = """
import importlib.util, sys
from pathlib import Path
import numpy as np, torch, transformers
from PIL import Image
assert importlib.util.find_spec("omni_ds") is None
for folder in Path(sys.argv[1]).iterdir():
    data = torch.load(folder / "inputs.pt", weights_only=False)
    kind = transformers.AutoTokenizer if folder.name == "text" else transformers.AutoProcessor
    processor = kind.from_pretrained(folder / "model", trust_remote_code=True)
    texts = [
        processor.apply_chat_template(m, add_generation_prompt=True, tokenize=False) for m in data["messages"]
    ]
    media = {key: data[key] for key in ("images", "audio") if data[key]}
    if "images" in media:
        media["images"] = [Image.fromarray(array) for array in media["images"]]
    padded = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    out = dict(processor(text=texts, **media, **padded))
    plain = folder.name in ("both", "text")
    short = processor(text=texts[1], return_tensors="pt")["input_ids"] if plain else None
    again = None
    if folder.name != "text":
        processor.save_pretrained(folder / "again")
        loaded = kind.from_pretrained(folder / "again", trust_remote_code=True)
        again = dict(loaded(text=texts, **media, **padded))
        refused = []
        for wrong in (texts[1], texts[0] + texts[0]):
            try:
                processor(text=wrong, **media)
            except Exception as error:
                refused.append(str(error))
        out["refused"] = refused
    if "image_sizes" in out:
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder / "model", trust_remote_code=True
        ).eval()
        with torch.no_grad():
            out["rows"] = model.get_media_features("image", **out)
    torch.save({"out": out, "again": again, "short": short}, folder / "outputs.pt")
"""


def chat(reference):
    """(messages with parts, row for training, media): one sample with two media of each kind, one of text."""
    rng = np.random.default_rng(0)
    modalities = [encoder.meta.modality for encoder in reference.encoders.values()]
    images = [rng.integers(0, 255, shape, dtype=np.uint8) for shape in ((40, 33, 3), (20, 50))]
    clips = [rng.normal(0, 0.1, count).astype(np.float32) for count in (5005, 19231)]
    media = {
        "image": images if "image" in modalities else [],
        "audio": clips if "audio" in modalities else [],
    }
    parts = []
    for modality, values in media.items():
        for value in values:
            parts += [{"type": "text", "text": "1 + 2"}, {"type": modality, modality: value}]
    parts.append({"type": "text", "text": "3"})
    first = [{"role": "user", "content": parts if len(parts) > 1 else "1 + 2"}]
    second = [{"role": "user", "content": "4 + 5"}]
    return [first, second], media


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("processors")
    made = {}
    for case in CASES:
        reference = Reference(case)
        messages, media = chat(reference)
        reference.export(root / case.name / "model")
        inputs = {"messages": messages, "images": media["image"], "audio": media["audio"]}
        torch.save(inputs, root / case.name / "inputs.pt")
        made[case.name] = (reference, messages, media)
    home = tmp_path_factory.mktemp("home")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(root)], cwd=home, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        name: (*values, torch.load(root / name / "outputs.pt", weights_only=False))
        for name, values in made.items()
    }


@pytest.fixture(params=[case.name for case in CASES])
def result(request, results):
    return results[request.param]


def training_text(reference):
    sections = {name: section for name, (_, section) in reference.case.encoders.items()}
    return TextProcessor(reference.tokenizer, add_placeholders(reference.tokenizer, sections))


def training_prompt(reference, messages, media, text):
    """Ids up to the answer as training lays them out, and rows of each medium."""
    raw = {"messages": [*messages, {"role": "assistant", "content": "7"}]}
    sample = RowReader(text.modalities, Path()).read(with_references(raw))
    tokenised = text.tokenise(sample)
    encoders = {encoder.meta.modality: (name, encoder.meta) for name, encoder in reference.encoders.items()}
    rows = []
    for ref in sample.media:
        name, meta = encoders[ref.modality]
        rows.append(meta.measure(reference.media[name].plan_shape(header(ref)))[1])
    ids, labels, _ = tokenised.expand(rows)
    return ids[: int((labels >= 0).argmax()) + 1].tolist()


def with_references(raw):
    """Audio arrays need their rate in a row."""
    for message in raw["messages"]:
        if not isinstance(message["content"], str):
            message = message["content"]
            for number, part in enumerate(message):
                if part["type"] == "audio":
                    message[number] = {
                        "type": "audio",
                        "audio": {"array": part["audio"], "sampling_rate": 16000},
                    }
    return raw


def header(ref):
    if ref.modality == "image":
        return MediaHeader("image", height=ref.array.shape[0], width=ref.array.shape[1])
    return MediaHeader("audio", samples=len(ref.array), sampling_rate=16000)


def test_ids_equal_those_of_training(result):
    reference, messages, media, outputs = result
    text = training_text(reference)
    expected = [training_prompt(reference, m, media, text) for m in messages]
    ids, mask = outputs["out"]["input_ids"], outputs["out"]["attention_mask"]
    for row, kept, wanted in zip(ids, mask, expected, strict=True):
        assert row[kept.bool()].tolist() == wanted
        assert kept.tolist() == sorted(kept.tolist())  # padding is on the left
    if outputs["short"] is not None:
        assert outputs["short"][0].tolist() == expected[1]


def test_media_equal_those_of_training(result):
    reference, _, media, outputs = result
    out = outputs["out"]
    for name, encoder in reference.encoders.items():
        meta, preprocess = encoder.meta, reference.media[name]
        for number, array in enumerate(media[meta.modality]):
            rate = {"sampling_rate": 16000} if meta.modality == "audio" else {}
            ref = MediaRef(meta.modality, array=array, **rate)
            expected = preprocess.load(ref, preprocess.plan_shape(header(ref)))
            if meta.modality == "image":
                got = out["pixel_values"][number]
                if "image_sizes" in out:
                    height, width = out["image_sizes"][number].tolist()
                    got = got[:, :height, :width]
            else:
                got = out["input_features"][number][:, : int(out["feature_lengths"][number])]
            assert got.shape == expected.shape
            assert np.abs(got.numpy() - expected).max() <= 1e-6


@pytest.mark.parametrize("name", [case.name for case in CASES if case.name.startswith("na")])
def test_rows_of_native_images_equal_those_of_training(results, name):
    """What the exported processor and model make of images: the rows of our preprocessing and encoder."""
    reference, _, media, outputs = results[name]
    encoder, preprocess = reference.encoders["eye"], reference.media["eye"]
    values = []
    for array in media["image"]:
        ref = MediaRef("image", array=array)
        values.append(torch.from_numpy(preprocess.load(ref, preprocess.plan_shape(header(ref)))))
    assert len({value.shape for value in values}) == len(values)
    with torch.no_grad():
        expected = encoder(values)
    rows = torch.cat(outputs["out"]["rows"])
    assert rows.shape == expected.shape
    assert (rows - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_saving_again_changes_nothing_and_wrong_counts_are_refused(result):
    reference, *_, outputs = result
    if reference.case.name == "text":
        assert outputs["again"] is None
        return
    out = dict(outputs["out"])
    refused = out.pop("refused")
    out.pop("rows", None)
    assert set(outputs["again"]) == set(out)
    for key, value in out.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(outputs["again"][key]))
    assert len(refused) == 2
