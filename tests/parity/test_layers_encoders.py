"""Packed encoders against HF's towers run on each item alone: features and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModel, LlavaConfig, LlavaForConditionalGeneration
from transformers.models.siglip2.image_processing_pil_siglip2 import convert_image_to_patches
from transformers.models.whisper.modeling_whisper import WhisperEncoder as HFWhisperEncoder

from models.encoders import Encoder, RuntimeEncoders, build_encoder
from models.encoders.whisper import pad_window
from models.projector import pixel_shuffle
from tests.unit.model_helpers import VITS, WHISPER, encoder_section, llm_config

TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}
HIDDEN = 24


def perturbed(module: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module


def assert_same_gradient(name: str, ours: Tensor, theirs: Tensor) -> None:
    """To rounding of the largest element. A key bias shifts all scores of a query alike: no gradient."""
    if name.endswith(("k_proj.bias", "key.bias")):
        assert ours.abs().max() < 1e-4 and theirs.abs().max() < 1e-4, name
        return
    scale = theirs.abs().max().item()
    difference = (ours - theirs).abs().max().item()
    assert scale > 0 and difference <= 1e-5 * scale, f"{name} differs by {difference}, largest is {scale}"


def built(config: dict, **keys) -> Encoder:
    return perturbed(
        build_encoder("x", encoder_section(config, **keys), AutoConfig.for_model(**config), HIDDEN)
    )


def hf_vit(config: dict) -> torch.nn.Module:
    hf_config = AutoConfig.for_model(**config)
    return perturbed(AutoModel.from_config(hf_config, attn_implementation="eager"))


def copy_tower(encoder: Encoder, reference: torch.nn.Module) -> None:
    state = reference.state_dict()
    encoder.tower.load_state_dict({name: state[name] for name in encoder.tower.state_dict()})


def hf_hidden_states(reference: torch.nn.Module, image: Tensor) -> tuple[Tensor, ...]:
    if reference.config.model_type == "siglip2_vision_model":
        patches = torch.from_numpy(convert_image_to_patches(image.numpy(), 4))[None]
        grid = torch.tensor([[side // 4 for side in image.shape[1:]]])
        mask = torch.ones(patches.shape[:2], dtype=torch.int64)
        return reference(patches, mask, grid, output_hidden_states=True).hidden_states
    native = image.shape[-2:] == (16, 16)
    takes_flag = "dinov2" not in reference.config.model_type
    kwargs = {"interpolate_pos_encoding": not native} if takes_flag else {}
    return reference(image[None], output_hidden_states=True, **kwargs).hidden_states


@pytest.mark.parametrize("layer", [-1, -2, 1])
@pytest.mark.parametrize("name", list(VITS))
def test_vit_equals_hf_hidden_states(name: str, layer: int) -> None:
    """Images of four sizes in one pack; the features are HF's ``hidden_states[layer]``, never normalised."""
    reference = hf_vit(VITS[name])
    encoder = built(VITS[name], feature_layer=layer)
    copy_tower(encoder, reference)
    # One row for NaFlex: to one column torch 2.13 antialiases wrongly on CPU, and so does HF's class.
    thin = (4, 40) if name == "naflex" else (40, 4)
    images = [torch.randn(3, *size) for size in ((16, 16), (8, 20), (16, 16), (12, 12), thin)]
    prefix = encoder.meta.prefix
    expected = torch.cat([hf_hidden_states(reference, image)[layer][0, prefix:] for image in images])
    features, grids = encoder.features(images)
    torch.testing.assert_close(features, expected, **TOLERANCE)
    assert grids == [(4, 4), (2, 5), (4, 4), (3, 3), (thin[0] // 4, thin[1] // 4)]
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (features * weights).sum().backward()
    theirs = dict(reference.named_parameters())
    trained = 0
    for local, parameter in encoder.tower.named_parameters():
        if not parameter.requires_grad:
            assert theirs[local].grad is None, f"{local} is frozen but takes part"
            continue
        trained += 1
        assert_same_gradient(local, parameter.grad, theirs[local].grad)
    assert trained > 10


@pytest.mark.parametrize("name", ["siglip", "clip", "dinov2"])
def test_last_hidden_state_is_not_normalised(name: str) -> None:
    """What LLaVA takes for -1 is the residual stream, before post_layernorm, in CLIP, SigLIP and DINOv2."""
    reference = hf_vit(VITS[name])
    output = reference(torch.randn(1, 3, 16, 16), output_hidden_states=True)
    norm = reference.layernorm if name == "dinov2" else reference.post_layernorm
    normed = norm(output.hidden_states[-1])
    assert (normed - output.hidden_states[-1]).abs().max() > 0.1
    if name != "clip":  # CLIP's last_hidden_state is not normalised either
        torch.testing.assert_close(normed, output.last_hidden_state)


@pytest.mark.parametrize(
    ("tower", "layer", "select"), [("clip", None, None), ("siglip", None, None), ("clip", 2, "full")]
)
def test_equals_llava(tower: str, layer: int | None, select: str | None) -> None:
    """Tower and projector give LLaVA's image features, gradients included."""
    encoder = built(VITS[tower], feature_layer=layer, feature_select=select)
    default = {"clip": -2, "siglip": -1}[tower]
    strategy = "full" if select == "full" or tower == "siglip" else "default"
    config = LlavaConfig(
        vision_config=AutoConfig.for_model(**VITS[tower]),
        text_config=AutoConfig.for_model(**llm_config("llama", hidden_size=HIDDEN)),
        vision_feature_layer=default if layer is None else layer,
        vision_feature_select_strategy=strategy,
        image_token_index=60,
    )
    llava = perturbed(LlavaForConditionalGeneration(config))
    copy_tower(encoder, llava.model.vision_tower)
    encoder.projector.load_state_dict(llava.model.multi_modal_projector.state_dict())
    images = torch.randn(3, 3, 16, 16)
    expected = torch.cat(list(llava.get_image_features(images).pooler_output))
    rows = encoder(list(images))
    torch.testing.assert_close(rows, expected, **TOLERANCE)
    expected.square().sum().backward()
    rows.square().sum().backward()
    for name, parameter in encoder.projector.named_parameters():
        theirs = llava.model.multi_modal_projector.get_parameter(name).grad
        assert_same_gradient(name, parameter.grad, theirs)


def test_cut_tower_is_an_hf_class() -> None:
    """The built config alone rebuilds the tower, and LLaVA takes its features at -1: as exports have it."""
    encoder = built(VITS["clip"])
    assert encoder.config.num_hidden_layers == 2
    config = copy.deepcopy(encoder.config)
    config._attn_implementation = "eager"
    again = AutoModel.from_config(config)
    again.load_state_dict(encoder.tower.state_dict())
    image = torch.randn(3, 16, 16)
    expected = again(image[None], output_hidden_states=True).hidden_states[-1][0, 1:]
    torch.testing.assert_close(encoder.features([image])[0], expected, **TOLERANCE)


def hf_whisper_truncated(reference: HFWhisperEncoder, mel: Tensor) -> Tensor:
    """HF's modules on the clip's own frames: the encoder's forward without its length check."""
    hidden = F.gelu(reference.conv2(F.gelu(reference.conv1(mel[None])))).transpose(1, 2)
    hidden = hidden + reference.embed_positions.weight[: hidden.shape[1]]
    for layer in reference.layers:
        hidden = layer(hidden, None)
    return reference.layer_norm(hidden)[0]


def test_whisper_equals_hf_on_the_truncated_sequence() -> None:
    reference = perturbed(HFWhisperEncoder(AutoConfig.for_model(**WHISPER)))
    encoder = built(WHISPER)
    copy_tower(encoder, reference)
    clips = [torch.randn(8, n) for n in (33, 40, 1, 7, 95, 34, 8)]
    expected = torch.cat(
        [hf_whisper_truncated(reference, w) for clip in clips for w in clip.split(40, dim=1)]
    )
    features, grids = encoder.features(clips)
    assert grids == [(1, n) for n in (17, 20, 1, 4, 48, 17, 4)]
    torch.testing.assert_close(features, expected, **TOLERANCE)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (features * weights).sum().backward()
    for local, parameter in encoder.tower.named_parameters():
        if local == "embed_positions.weight":
            assert not parameter.requires_grad
            continue
        assert_same_gradient(local, parameter.grad, reference.get_parameter(local).grad)


def test_whisper_padded_equals_hf() -> None:
    """``pad_to_window`` is HF's own forward on full windows, also for a clip that arrives short."""
    reference = perturbed(HFWhisperEncoder(AutoConfig.for_model(**WHISPER)))
    encoder = built(WHISPER, processor={"pad_to_window": True})
    copy_tower(encoder, reference)
    clips = [torch.randn(8, 40), torch.randn(8, 13)]
    full = [clips[0], pad_window(clips[1], 40)]
    expected = torch.cat([reference(clip[None]).last_hidden_state[0] for clip in full])
    torch.testing.assert_close(encoder.features(clips)[0], expected, **TOLERANCE)


def test_silence_has_the_feature_extractors_value() -> None:
    """Filling frames continues what WhisperFeatureExtractor yields for a clip padded with zeros."""
    import numpy as np
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    sound = np.random.default_rng(0).standard_normal(8000).astype(np.float32) * 0.1
    padded = torch.from_numpy(extractor(sound, sampling_rate=16000, return_tensors="np").input_features[0])
    assert padded.shape == (8, 100)
    filled = pad_window(padded[:, :52], 100)
    torch.testing.assert_close(filled, padded)


@pytest.mark.parametrize("factor", [2, 4])
def test_frame_stack_pads_the_last_group_of_each_item(factor: int) -> None:
    encoder = built(WHISPER, projector={"reduction": "frame_stack", "factor": factor})
    clips = [torch.randn(8, n) for n in (33, 95, 8)]
    features, grids = encoder.features(clips)
    stacked = []
    for item in features.split([n for _, n in grids]):
        padding = torch.zeros(-item.shape[0] % factor, 32)
        stacked.append(torch.cat([item, padding]).reshape(-1, factor * 32))
    projector = encoder.projector
    expected = projector.linear_2(F.gelu(projector.linear_1(torch.cat(stacked))))
    torch.testing.assert_close(encoder(clips), expected, **TOLERANCE)


def test_pixel_shuffle_is_internvls() -> None:
    from transformers.models.internvl.modeling_internvl import InternVLModel

    grid = torch.randn(2, 4, 6, 5)
    # HF's takes a square grid as (batch, width, height, channels)
    square = torch.randn(2, 4, 4, 5)
    expected = InternVLModel.pixel_shuffle(None, square, 0.5)
    assert torch.equal(pixel_shuffle(square.flatten(0, 2), 4, 4, 2), expected.flatten(0, 2))
    block = pixel_shuffle(grid.flatten(0, 2), 4, 6, 2)[4]
    assert torch.equal(block, grid[0, 2:4, 2:4].flatten())


def test_pixel_shuffle_of_unequal_images_keeps_order() -> None:
    encoder = built(VITS["siglip"], projector={"reduction": "pixel_shuffle", "factor": 2})
    images = [torch.randn(3, 16, 16), torch.randn(3, 8, 24), torch.randn(3, 16, 16)]
    alone = torch.cat([encoder([image]) for image in images])
    torch.testing.assert_close(encoder(images), alone, **TOLERANCE)


@pytest.mark.parametrize("recompute", [False, True])
def test_runtime_encoders(recompute: bool) -> None:
    """Rows in config order; a minimal pass adds none and gives its encoder zero gradients."""
    sections = {"vision": (VITS["siglip"], {}), "audio": (WHISPER, {"freeze": True})}
    encoders = {
        name: build_encoder(
            name, encoder_section(c, **keys), AutoConfig.for_model(**c), HIDDEN, recompute=recompute
        )
        for name, (c, keys) in sections.items()
    }
    runtime = RuntimeEncoders(encoders, HIDDEN)
    images, clips = [torch.randn(3, 16, 16)] * 2, [torch.randn(8, 9)]
    rows = runtime({"audio": clips, "vision": images})
    torch.testing.assert_close(rows, torch.cat([encoders["vision"](images), encoders["audio"](clips)]))
    rows = runtime({"audio": clips}, minimal=("vision", "audio"))
    assert rows.shape == (5, HIDDEN)
    rows.sum().backward()
    for name, parameter in runtime.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.any() != name.startswith("encoders.vision"), name
    rows = runtime({}, minimal=("vision", "audio"))
    assert rows.shape == (0, HIDDEN)
    rows.backward(torch.zeros_like(rows))
    assert runtime({}).shape == (0, HIDDEN)
    assert not any(p.requires_grad for p in encoders["audio"].tower.parameters())
