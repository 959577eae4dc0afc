"""The plan's numbers of an encoder against the modules that are built, and its geometry errors."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from models.encoders import build_encoder
from omni_ds.errors import UserError
from omni_ds.plan.encoder_meta import EncoderMeta
from tests.unit.model_helpers import ENCODERS, VITS, WHISPER, encoder_section

LLM_HIDDEN = 24


def meta(config: dict, **keys) -> EncoderMeta:
    return EncoderMeta.from_config("v", encoder_section(config, **keys), config, LLM_HIDDEN)


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("layer", [None, -1, -2])
@pytest.mark.parametrize("name", list(ENCODERS))
def test_parameter_counts(name: str, layer: int | None) -> None:
    if name == "whisper" and layer == -2:
        with pytest.raises(UserError, match="feature_layer"):
            meta(WHISPER, feature_layer=layer)
        return
    section = encoder_section(ENCODERS[name], feature_layer=layer)
    encoder = build_encoder("v", section, AutoConfig.for_model(**ENCODERS[name]), LLM_HIDDEN)
    assert encoder.meta == meta(ENCODERS[name], feature_layer=layer)
    assert encoder.meta.tower_parameters == parameters(encoder.tower)
    assert encoder.meta.projector_parameters == parameters(encoder.projector)


@pytest.mark.parametrize(
    ("tower_frozen", "projector_frozen"), [(False, False), (True, False), (False, True), (True, True)]
)
@pytest.mark.parametrize("name", list(ENCODERS))
def test_flops_are_those_torch_counts(name: str, tower_frozen: bool, projector_frozen: bool) -> None:
    """One item of an even number of frames, so that nothing is padded."""
    projector = {"reduction": "frame_stack", "factor": 2, "freeze": projector_frozen}
    section = encoder_section(ENCODERS[name], projector=projector, freeze=tower_frozen)
    encoder = build_encoder("v", section, AutoConfig.for_model(**ENCODERS[name]), LLM_HIDDEN)
    shape = (8, 38) if name == "whisper" else (3, 16, 16)
    segments, rows = encoder.meta.measure(shape[1:])
    value = torch.randn(shape)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            out = encoder([value])
        with FlopCounterMode(display=False) as backward:
            if out.requires_grad:
                out.sum().backward()
    assert encoder.meta.forward_flops(segments, rows) == forward.get_total_flops()
    expected = encoder.meta.backward_flops(segments, rows)
    assert expected == backward.get_total_flops()
    assert (expected == 0) == (tower_frozen and projector_frozen)


def test_image_shapes() -> None:
    clip = meta(VITS["clip"])
    assert clip.measure((16, 16)) == ((17,), 16)
    assert clip.measure((11, 22)) == ((1 + 2 * 5,), 10)
    assert meta(VITS["clip"], feature_select="full").measure((16, 16)) == ((17,), 17)
    assert meta(VITS["siglip"], feature_select="full").measure((16, 16)) == ((16,), 16)
    registers = meta(VITS["dinov2-registers"])
    assert registers.prefix == 3 and registers.measure((16, 16)) == ((19,), 16)
    shuffled = meta(VITS["siglip"], projector={"reduction": "pixel_shuffle", "factor": 2})
    assert shuffled.measure((16, 24)) == ((24,), 6)
    assert shuffled.minimal_shape() == (8, 8) and shuffled.projector_in == 4 * 32
    with pytest.raises(UserError, match=r"4 x 5 patch grid does not divide by pixel_shuffle 2"):
        shuffled.measure((16, 20))
    with pytest.raises(UserError, match="smaller than one patch"):
        clip.measure((3, 16))


def test_audio_shapes() -> None:
    own = meta(WHISPER)
    assert own.window == 40
    assert own.measure((1,)) == ((1,), 1)
    assert own.measure((39,)) == ((20,), 20)
    assert own.measure((95,)) == ((20, 20, 8), 48)
    assert meta(WHISPER, processor={"pad_to_window": True}).measure((41,)) == ((20, 20), 40)
    stacked = meta(WHISPER, projector={"reduction": "frame_stack", "factor": 5})
    assert stacked.measure((95,)) == ((20, 20, 8), 10)
    with pytest.raises(UserError, match="mel frame"):
        own.measure((0,))


def test_geometry_is_refused_before_loading() -> None:
    so400m = VITS["siglip"] | {"image_size": 384, "patch_size": 14}
    with pytest.raises(UserError, match=r"27 x 27 patch grid does not divide by pixel_shuffle 2; 3 does"):
        meta(so400m, projector={"reduction": "pixel_shuffle", "factor": 2})
    assert meta(so400m, projector={"reduction": "pixel_shuffle", "factor": 3}).measure((384, 384))[1] == 81


@pytest.mark.parametrize(
    ("config", "keys", "match"),
    [
        ({"model_type": "vit"}, {}, "siglip"),
        (WHISPER, {"modality": "image"}, "encodes audio"),
        (WHISPER, {"projector": {"reduction": "pixel_shuffle", "factor": 2}}, "frame_stack"),
        (VITS["clip"], {"feature_layer": 9}, "3 layers"),
        (VITS["clip"], {"feature_layer": 0}, "3 layers"),
        (VITS["clip"] | {"image_size": [16, 8]}, {}, "not square"),
        (VITS["clip"] | {"num_attention_heads": 5}, {}, "does not divide"),
        (
            VITS["clip"],
            {"feature_select": "full", "projector": {"reduction": "pixel_shuffle", "factor": 2}},
            "patch",
        ),
    ],
)
def test_refusals(config: dict, keys: dict, match: str) -> None:
    with pytest.raises(UserError, match=match):
        meta(config, **keys)


def test_composite_config_and_defaults() -> None:
    """The vision part of a whole checkpoint's config.json, which lists only what is not a default."""
    raw = {"model_type": "clip", "vision_config": {"num_hidden_layers": 6, "patch_size": 16}}
    ours = meta(raw, modality=None)
    full = AutoConfig.for_model("clip", vision_config=raw["vision_config"]).to_dict()
    assert ours == meta(full) and ours.layers == 5 and ours.hidden == 768 and ours.modality == "image"
    for model_type in ("siglip", "dinov2", "dinov2_with_registers", "whisper"):
        default = AutoConfig.for_model(model_type).to_dict()
        keys = {"modality": "audio" if model_type == "whisper" else "image"}
        assert meta({"model_type": model_type}, **keys) == meta(default, **keys)
