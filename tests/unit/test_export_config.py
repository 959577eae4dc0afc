"""Which class a composition is exported as, the chat template that goes with it, and incomplete exports."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, CLIPVisionConfig, LlamaConfig

from omni_ds.checkpoint.export import ExportParts, ShardWriter, finish_export
from omni_ds.checkpoint.export_config import plan_layout
from omni_ds.checkpoint.export_template import end_of_turn_ids, export_template
from omni_ds.config import EncoderConfig, ProjectorConfig
from omni_ds.errors import UserError
from tests.parity.export_support import LLM, TOKENIZER, VIT, image

LLAMA = LlamaConfig(vocab_size=64, **LLM)
FIXED = SimpleNamespace(size={"height": 28, "width": 28})


def config_of(**encoders):
    data = SimpleNamespace(chat_template=None, chat_template_kwargs={})
    return SimpleNamespace(omni=SimpleNamespace(encoders=encoders, data=data))


def clip(layers=3):
    return CLIPVisionConfig(num_hidden_layers=layers, **VIT)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, "llava"),
        ({"feature_select": "full"}, "llava"),
        ({"reduction": "pixel_shuffle", "factor": 2}, "composed"),
        ({"width": 20}, "composed"),
    ],
)
def test_what_is_llava(change, kind):
    _, section = image(model_type="clip_vision_model", **change)
    layout = plan_layout(config_of(eye=section), LLAMA, {"eye": clip()}, {"eye": 5}, {"eye": FIXED})
    assert layout.kind == kind


def test_llava_needs_images_of_the_towers_size():
    _, section = image(model_type="clip_vision_model")
    for processor in (
        SimpleNamespace(size={"height": 42, "width": 28}),
        SimpleNamespace(size=28, do_center_crop=True, crop_size={"height": 14, "width": 14}),
    ):
        layout = plan_layout(config_of(eye=section), LLAMA, {"eye": clip()}, {"eye": 5}, {"eye": processor})
        assert layout.kind == "composed"


def test_llava_layers_and_names():
    """CLIP's default feature layer is -2: the last of its layers is not there, and -1 is what remains."""
    _, section = image(model_type="clip_vision_model")
    layout = plan_layout(config_of(eye=section), LLAMA, {"eye": clip(4)}, {"eye": 5}, {"eye": FIXED})
    assert layout.config.vision_config.num_hidden_layers == 3
    assert layout.config.vision_feature_layer == -1
    assert layout.config.vision_feature_select_strategy == "default"
    assert layout.config.image_token_index == 5
    names = {
        "llm.model.norm.weight": "language_model.model.norm.weight",
        "llm.lm_head.weight": "language_model.lm_head.weight",
        "encoders.eye.projector.linear_1.bias": "multi_modal_projector.linear_1.bias",
        "encoders.eye.tower.post_layernorm.bias": "vision_tower.post_layernorm.bias",
    }
    for name, exported in names.items():
        assert layout.rename(name) == exported
        assert exported in layout.shapes


def test_tied_head_has_no_tensor():
    tied = LlamaConfig(vocab_size=64, tie_word_embeddings=True, **LLM)
    for section in (
        image(model_type="clip_vision_model")[1],
        image(model_type="clip_vision_model", width=9)[1],
    ):
        layout = plan_layout(config_of(eye=section), tied, {"eye": clip()}, {"eye": 5}, {"eye": FIXED})
        assert not [name for name in layout.shapes if "lm_head" in name]
        assert [name for name in layout.shapes if "embed_tokens" in name]


def test_two_encoders_of_one_modality():
    section = EncoderConfig(config={}, modality="image", projector=ProjectorConfig())
    with pytest.raises(UserError, match="one encoder of each modality"):
        plan_layout(
            config_of(a=section, b=section),
            LLAMA,
            {"a": clip(), "b": clip()},
            {"a": 5, "b": 6},
            {"a": FIXED, "b": FIXED},
        )


def test_missing_unexpected_and_misshapen_tensors_are_listed(tmp_path):
    layout = plan_layout(config_of(), LLAMA, {}, {}, {})
    writer = ShardWriter(tmp_path / "out", "r", "1GB", lambda name: torch.float32)
    for name, shape in layout.shapes.items():
        if name == "model.norm.weight":
            continue
        writer.add(f"llm.{name}", torch.zeros(3) if name == "lm_head.weight" else torch.zeros(shape))
    writer.add("llm.model.extra", torch.zeros(1))
    parts = ExportParts(config_of(), LLAMA, {}, None, {}, None, {})
    with pytest.raises(UserError) as error:
        finish_export(tmp_path / "out", [writer.close()], parts)
    assert "missing: model.norm.weight" in str(error.value)
    assert "unexpected: model.extra" in str(error.value)
    assert "lm_head.weight (3,) instead of (64, 32)" in str(error.value)
    assert not (tmp_path / "out").exists()


STRINGS_ONLY = (
    "\n{% for m in messages %}<{{ m.role }}>{{ m.content + '' }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if not thinking %}<think></think>{% endif %}{% endif %}"
)


def test_a_template_for_strings_takes_parts_and_keeps_the_kwargs_of_the_run():
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)

    def render(template, messages, **kwargs):
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True, **kwargs
        )

    template = export_template(
        STRINGS_ONLY, {"image": "<|im|>"}, {"thinking": True, "unused": [None, {"a": 1}]}
    )
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "see <|im|>this"}]
    parts = [{"type": "text", "text": "see "}, {"type": "image"}, {"type": "text", "text": "this"}]
    for messages in (plain, [plain[0], {"role": "user", "content": parts}]):
        assert render(template, messages) == render(STRINGS_ONLY, plain, thinking=True)
        assert render(template, messages, thinking=False) == render(STRINGS_ONLY, plain)
    assert export_template(STRINGS_ONLY, {}, {}) == STRINGS_ONLY


def test_the_end_of_turn_ends_an_answer():
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    end, pad = tokenizer.convert_tokens_to_ids(["<|end|>", "<|pad|>"])
    assert end_of_turn_ids(tokenizer, STRINGS_ONLY) == [end]
    tokenizer.eos_token = "<|pad|>"
    assert end_of_turn_ids(tokenizer, STRINGS_ONLY) == [end, pad]
    assert end_of_turn_ids(tokenizer, "{{ raise_exception('no') }}") == [pad]
    assert end_of_turn_ids(tokenizer, None) == [pad]
