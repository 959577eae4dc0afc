"""What is peculiar to Gemma3 and Voxtral: inputs, sizes, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from torch import nn
from transformers import AutoConfig, AutoTokenizer, Gemma3Config, VoxtralConfig

from data.model_text import ModelTextProcessor
from data.pack import pack_samples
from data.placeholders import Placeholder
from data.processors import load_tokenizer
from data.rows import RowReader
from models import fused
from models.decoders import find_family
from models.init import init_module
from models.llm import build_llm_layers
from models.multimodal import read_model
from omni_ds.composition import complete, read_composition
from omni_ds.config import validate
from omni_ds.config.parts import LLMConfig
from omni_ds.errors import UserError
from tests.families import make_model, model_config
from tests.unit.model_helpers import llm_config
from tests.unit.test_model_inputs import opened, row

ROOT = Path(__file__).parents[2]
SIZES = {
    "gemma3": {
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        "vision_config": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 896,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
    "voxtral": {"audio_token_id": 24},
}


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def voxtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("voxtral", tmp_path_factory.mktemp("voxtral"))


@pytest.mark.parametrize(("family", "rows"), [("gemma3", 256), ("voxtral", 375)])
def test_numbers_of_the_published_sizes_are_those_of_hf(family: str, rows: int, tmp_path: Path) -> None:
    {"gemma3": Gemma3Config, "voxtral": VoxtralConfig}[family](**SIZES[family]).save_pretrained(tmp_path)
    tower = "vision" if family == "gemma3" else "audio"
    config = complete(validate(model_config(tmp_path, tmp_path / "rows.jsonl", tmp_path, (tower,))))
    parts = read_composition(config, processors=False)
    (meta,) = parts.encoders
    model = read_model(config.omni.model).model
    counted = {name: p.numel() for name, p in model.named_parameters()}  # a tied matrix once
    towers = sum(n for name, n in counted.items() if f"{tower}_tower" in name)
    projector = sum(n for name, n in counted.items() if "projector" in name)
    assert (meta.tower_parameters, meta.projector_parameters) == (towers, projector)
    assert parts.llm.parameters == sum(counted.values()) - towers - projector
    shape = (896, 896) if family == "gemma3" else (3000,)
    assert meta.measure(shape)[1] == rows
    if family == "gemma3":
        assert sum(counted.values()) == 4_300_079_472
        assert (parts.llm.window, parts.llm.full_layers) == (1024, (5, 11, 17, 23, 29))
    else:
        assert meta.measure((9000,)) == ((1500,) * 3, 3 * 375)


def test_images_are_spans_and_surrounded_as_by_hf(gemma3: Path, tmp_path: Path) -> None:
    rows = [row("<image>Which? <image>", images=["1-0.png", "2-0.png"]), row("1 + 1?")]
    dataset = opened(gemma3, tmp_path, rows)
    sample, tokenizer = dataset.encode(0), dataset.text.tokenizer
    image = "\n\n<start_of_image>" + "<image_soft_token>" * 16 + "<end_of_image>\n\n"
    assert tokenizer.decode(sample.input_ids).startswith(f"<|user|>{image}Which?{image}<|end|>")
    packed = pack_samples([sample], (0, len(sample.input_ids)), blocks=dataset.text.blocks)
    places = np.flatnonzero(sample.input_ids == tokenizer.image_token_id)
    assert packed.spans == ((int(places[0]), 16), (int(places[16]), 16))


@pytest.mark.parametrize("token", ["<start_of_image>", "<image_soft_token>"])
def test_a_text_that_would_be_an_image_is_refused(token: str, gemma3: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"given.jsonl:2: text contains a placeholder token: '{token}'"):
        opened(gemma3, tmp_path, [row("1 + 1?"), row(f"What is {token}?")], on_error="raise")


def test_pan_and_scan_is_refused(tmp_path: Path) -> None:
    model = make_model("gemma3", tmp_path / "model")
    file = model / "processor_config.json"
    content = json.loads(file.read_text())
    content["image_processor"]["do_pan_and_scan"] = True
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="do_pan_and_scan cuts an image into several"):
        opened(model, tmp_path / "rows", [row("1 + 1?")])


def test_images_of_another_size_are_refused(tmp_path: Path) -> None:
    model = make_model("gemma3", tmp_path / "model")
    file = model / "processor_config.json"
    content = json.loads(file.read_text())
    content["image_processor"]["size"] = {"height": 64, "width": 64}
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="images of 64 x 64 pixels, the tower takes 32 x 32; use"):
        opened(model, tmp_path / "rows", [row("<image>?", images=["1-0.png"])], on_error="raise")


@pytest.mark.parametrize(
    "key", ["attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"]
)
def test_what_no_released_gemma3_has_is_refused(key: str) -> None:
    config = AutoConfig.for_model(**llm_config("gemma3", **{key: 30.0 if "soft" in key else True}))
    with pytest.raises(UserError, match=f"a gemma3_text with {key}"):
        find_family(config)


def test_rotations_that_depend_on_the_batch_are_found_in_every_type_of_layer() -> None:
    rotations = llm_config("gemma3")["rope_parameters"] | {
        "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}
    }
    config = AutoConfig.for_model(**llm_config("gemma3", rope_parameters=rotations))
    with pytest.raises(UserError, match='rope_type "dynamic"'):
        find_family(config)


def test_fused_kernels_of_other_norms_and_activations_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "has_liger", lambda: True)
    layer = build_llm_layers(AutoConfig.for_model(**llm_config("gemma3")))[1].build().layer
    changed = {
        name
        for name, module in layer.named_modules()
        if type(module) is not nn.Linear and fused._forward_of(module) is not None
    }
    assert changed == {"self_attn"}  # whose own norms stay as they are


def test_fresh_norms_start_as_in_hf() -> None:
    _, layer, _, norm, _ = build_llm_layers(AutoConfig.for_model(**llm_config("gemma3")))
    for module in (layer.build(), norm.build()):
        init_module(module, module.hf_names(), seed=1, std=0.02)
        norms = [p for name, p in module.named_parameters() if "norm" in name]
        assert norms and not any(p.any() for p in norms)


def test_a_clip_is_filled_up_to_windows(voxtral: Path, tmp_path: Path) -> None:
    import soundfile

    (tmp_path / "rows").mkdir()
    soundfile.write(tmp_path / "rows" / "long.wav", np.zeros(16000 * 2 + 5, dtype=np.float32), 16000)
    rows = [row("<audio>?", audios=["long.wav"])]
    dataset = opened(voxtral, tmp_path / "rows", rows, "audio")
    (item,) = dataset.meta(0).items
    assert (item.shape, item.segments, item.rows) == ((240,), (40, 40, 40), 30)
    assert dataset.load_media(0, 0).shape == (16, 240)


def test_a_clip_above_max_seconds_is_refused(voxtral: Path, tmp_path: Path) -> None:
    import soundfile

    (tmp_path / "rows").mkdir()
    soundfile.write(tmp_path / "rows" / "long.wav", np.zeros(16000 * 31, dtype=np.float32), 16000)
    with pytest.raises(UserError, match="given.jsonl:1: audio longer than max_seconds: 31.0 s"):
        opened(voxtral, tmp_path / "rows", [row("<audio>?", audios=["long.wav"])], "audio", on_error="raise")


def test_padding_to_windows_is_the_checkpoints(voxtral: Path, tmp_path: Path) -> None:
    raw = model_config(voxtral, tmp_path / "rows.jsonl", tmp_path, ("audio",))
    raw["omni"]["encoders"]["audio"]["processor"] = {"pad_to_window": False}
    with pytest.raises(UserError, match="pad_to_window is False, but the checkpoint has True"):
        complete(validate(raw))


def test_a_projector_of_a_checkpoint_cannot_be_composed() -> None:
    raw = model_config(Path("m"), Path("rows.jsonl"), Path("out"))
    del raw["omni"]["model"]
    raw["omni"]["llm"] = {"path": "m"}
    raw["omni"]["encoders"]["vision"] = {"path": "m", "modality": "image", "projector": {"type": "gemma3"}}
    with pytest.raises(UserError, match='projector.type: "gemma3" needs such an omni.model'):
        validate(raw)


def test_a_tokenizer_of_mistral_common_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *arguments, **keywords: object())
    with pytest.raises(UserError, match="the tokenizer of m is a slow one.*convert it to tokenizer.json"):
        load_tokenizer(LLMConfig(path="m"))


def test_the_tokenizer_of_mistral_is_read_from_its_own_file(tmp_path: Path) -> None:
    import base64

    VoxtralConfig(**SIZES["voxtral"]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no tokenizer can be loaded"):
        load_tokenizer(LLMConfig(path=str(tmp_path)))
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *(f"<SPECIAL_{i}>" for i in range(5, 24))]
    special += ["[AUDIO]", "[BEGIN_AUDIO]"]
    tekken = {
        "config": {
            "pattern": r"[^\s]+|\s+",
            "num_vocab_tokens": 400,
            "default_vocab_size": 400,
            "default_num_special_tokens": 100,
            "version": "v7",
        },
        "special_tokens": [{"rank": i, "token_str": s, "is_control": True} for i, s in enumerate(special)],
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None}
            for i in range(256)
        ],
    }
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    tokenizer = load_tokenizer(LLMConfig(path=str(tmp_path)))
    assert tokenizer.is_fast and tokenizer.chat_template is None
    assert tokenizer.encode("[BEGIN_AUDIO][AUDIO]", add_special_tokens=False) == [25, 24]
    clip = Placeholder("audio", "audio", "[AUDIO]", 24, added=False)
    template = (ROOT / "ds_configs" / "voxtral.jinja").read_text()
    text = ModelTextProcessor(tokenizer, {"audio": clip}, chat_template=template)
    made = text.tokenise(RowReader(("audio",), tmp_path).read(row("<audio>What?", audios=["a.wav"])))
    assert tokenizer.decode(made.ids) == "<s>[INST][BEGIN_AUDIO][AUDIO]What?[/INST]two</s>"
    assert tokenizer.decode(made.ids[made.targets]) == "two</s>" and made.slots == (3,)
