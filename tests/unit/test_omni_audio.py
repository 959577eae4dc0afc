"""The audio towers of Qwen2.5-Omni and Qwen3-Omni: features, rows and parts are HF's, clip by clip."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from models.encoders import build_encoder
from omni_ds.errors import UserError
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.long_short import split_item
from omni_ds.plan.sample import Item
from tests.unit.model_helpers import encoder_section

HIDDEN = 24
SIZES = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 10,
    "max_source_positions": 20,
    "output_dim": HIDDEN,
}
QWEN2_5 = SIZES | {"model_type": "qwen2_5_omni_audio_encoder", "n_window": 5}
QWEN2_5_EVEN = QWEN2_5 | {"n_window": 6}
QWEN3 = SIZES | {
    "model_type": "qwen3_omni_moe_audio_encoder",
    "n_window_infer": 200,
    "downsample_hidden_size": 3,
}
TOWERS = {"qwen2_5": QWEN2_5, "qwen2_5_even": QWEN2_5_EVEN, "qwen3": QWEN3}


def meta(config: dict[str, Any], **keys: Any) -> EncoderMeta:
    return EncoderMeta.from_config("audio", encoder_section(config, **keys), config, HIDDEN)


def built(config: dict[str, Any]) -> tuple[Any, nn.Module]:
    """Our encoder, and HF's tower with the same weights."""
    import transformers.models.qwen2_5_omni.modeling_qwen2_5_omni as qwen2_5
    import transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe as qwen3

    torch.manual_seed(0)
    hf_config = AutoConfig.for_model(**config)
    encoder = build_encoder("audio", encoder_section(config), hf_config, HIDDEN)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    cls = (
        qwen3.Qwen3OmniMoeAudioEncoder if "qwen3" in config["model_type"] else qwen2_5.Qwen2_5OmniAudioEncoder
    )
    hf = cls._from_config(hf_config, attn_implementation="eager")
    projector = "" if "qwen3" in config["model_type"] else "proj."
    state = dict(encoder.tower.state_dict())
    state |= {f"{projector}{name}": value for name, value in encoder.projector.state_dict().items()}
    hf.load_state_dict(state)
    return encoder.eval(), hf.eval()


@pytest.mark.parametrize("name", TOWERS)
def test_features_of_each_clip_are_those_of_hf(name: str) -> None:
    encoder, hf = built(TOWERS[name])
    lengths = [30, 31, 7, 100, 99, 101, 250, 333, 410, 3, 64]
    clips = [torch.randn(SIZES["num_mel_bins"], length) for length in lengths]
    with torch.no_grad():
        rows = encoder(clips).split([encoder.meta.measure((length,))[1] for length in lengths])
        for clip, ours in zip(clips, rows, strict=True):
            length = torch.tensor([clip.shape[1]])
            theirs = hf(clip, feature_lens=length).last_hidden_state
            assert ours.shape == theirs.shape
            assert (ours - theirs).abs().max() < 2e-5, clip.shape


@pytest.mark.parametrize("name", TOWERS)
def test_rows_are_those_hf_counts(name: str) -> None:
    import transformers.models.qwen2_5_omni.processing_qwen2_5_omni as qwen2_5
    import transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe as qwen3

    module, own = qwen3 if name == "qwen3" else qwen2_5, meta(TOWERS[name])
    for frames in range(3, 1000):
        assert own.measure((frames,))[1] == module._get_feat_extract_output_lengths(frames), frames
    if name != "qwen3":
        with pytest.raises(UserError, match="too short for one feature"):
            own.measure((2,))


@pytest.mark.parametrize("name", TOWERS)
def test_parts_of_a_recording_make_its_features(name: str) -> None:
    encoder, _ = built(TOWERS[name])
    for frames in (401, 410, 450, 500, 555):
        clip = torch.randn(SIZES["num_mel_bins"], frames)
        segments, rows = encoder.meta.measure((frames,))
        item = Item(0, 0, "audio", (frames,), segments, rows, ((5, rows),))
        unit = encoder.meta.segments_per_slice
        parts = split_item(encoder.meta, item, unit)
        assert len(parts) > 1 and sum(part.shape[0] for part in parts) == frames
        with torch.no_grad():
            made = [encoder([clip[:, part.start : part.start + part.shape[0]]]) for part in parts]
            assert [len(piece) for piece in made] == [part.rows for part in parts]
            assert (torch.cat(made) - encoder([clip])).abs().max() < 2e-5, frames


@pytest.mark.parametrize("name", TOWERS)
def test_parameters_and_work(name: str) -> None:
    encoder, _ = built(TOWERS[name])
    assert encoder.meta.tower_parameters == sum(p.numel() for p in encoder.tower.parameters())
    assert encoder.meta.projector_parameters == sum(p.numel() for p in encoder.projector.parameters())
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with math, FlopCounterMode(display=False) as counter:
        encoder([torch.randn(SIZES["num_mel_bins"], 400)])
    segments, rows = encoder.meta.measure((400,))
    counted = encoder.meta.forward_flops(segments, rows)
    # Convolutions also see the gaps between chunks, or half a token's frames less.
    assert counter.get_total_flops() == pytest.approx(counted, rel=0.08)


def test_sizes_that_hf_does_not_count_right() -> None:
    with pytest.raises(UserError, match="n_window 40 with n_window_infer 200 is not supported"):
        meta(QWEN3 | {"n_window": 40})
    with pytest.raises(UserError, match="parts of different models"):
        meta(QWEN2_5 | {"output_dim": 8})
    with pytest.raises(UserError, match="pad_to_window: qwen3_omni_moe_audio_encoder takes clips"):
        meta(QWEN3, processor={"pad_to_window": True})
