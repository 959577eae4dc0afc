"""Tiny configs of every supported family, and packed batches of random tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from models.packed import PackedBatch
from omni_ds.config.parts import EncoderConfig

LLM_BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLMS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama-tied-rope-bias": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": LLAMA3_ROPE,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral-sliding": {"model_type": "mistral", "sliding_window": 4, "head_dim": 8},
    "qwen2-sliding-half": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "tie_word_embeddings": True,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3-moe-mixed": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "mlp_only_layers": [0],
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,  # not a multiple of 8: without the grouped product
        "norm_topk_prob": False,
        "attention_bias": True,
    },
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_QWEN_MOE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Decoders inside multimodal models, whose configs say nothing of tied heads.
INNER_LLMS: dict[str, dict[str, Any]] = {
    name: {"model_type": name, "tie_word_embeddings": False} | config
    for name, config in {
        "qwen2_vl_text": _MROPE,
        "qwen2_5_vl_text": _MROPE,
        "qwen2_5_omni_text": _MROPE,
        "qwen3_vl_text": {"head_dim": 16},
        "qwen3_vl_moe_text": _QWEN_MOE,
        "qwen3_omni_moe_text": _QWEN_MOE,
    }.items()
}

_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
WHISPER = {
    "model_type": "whisper",
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_layers": 1,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "vocab_size": 32,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VITS: dict[str, dict[str, Any]] = {
    "siglip": {"model_type": "siglip_vision_model", "intermediate_size": 48} | _VIT,
    "naflex": {"model_type": "siglip2_vision_model", "intermediate_size": 48, "num_patches": 16}
    | {key: value for key, value in _VIT.items() if key != "image_size"},
    "clip": {"model_type": "clip_vision_model", "intermediate_size": 48} | _VIT,
    "dinov2": {"model_type": "dinov2", "mlp_ratio": 2, "layerscale_value": 0.7} | _VIT,
    "dinov2-swiglu": {"model_type": "dinov2", "mlp_ratio": 2, "use_swiglu_ffn": True} | _VIT,
    "dinov2-registers": {"model_type": "dinov2_with_registers", "mlp_ratio": 2, "num_register_tokens": 2}
    | _VIT,
}
ENCODERS = VITS | {"whisper": WHISPER}

_QWEN = {"depth": 3, "num_heads": 4, "patch_size": 4}
_QWEN2_5 = _QWEN | {
    "hidden_size": 64,
    "intermediate_size": 88,
    "out_hidden_size": 24,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
_QWEN3 = _QWEN | {
    "hidden_size": 64,
    "intermediate_size": 88,
    "out_hidden_size": 24,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [2, 0],
}
QWEN_TOWERS: dict[str, dict[str, Any]] = {
    kind: {"model_type": kind} | config
    for kind, config in {
        "qwen2_vl_vision": _QWEN | {"embed_dim": 64, "hidden_size": 24, "mlp_ratio": 2},
        "qwen2_5_vl_vision": _QWEN2_5,
        "qwen2_5_omni_vision_encoder": _QWEN2_5,
        "qwen3_vl_vision": _QWEN3,
        "qwen3_vl_moe_vision": _QWEN3,
        "qwen3_omni_moe_vision_encoder": _QWEN3,
    }.items()
}


def llm_config(name: str, **changes: Any) -> dict[str, Any]:
    return LLM_BASE | (LLMS | INNER_LLMS)[name] | changes


def encoder_section(config: dict[str, Any] | None = None, **keys: Any) -> EncoderConfig:
    """``omni.encoders.<name>`` with the modality that fits."""
    whisper = config is not None and config["model_type"] == "whisper"
    return EncoderConfig(**{"modality": "audio" if whisper else "image", "config": config} | keys)


def packed_batch(lengths: Sequence[int], vocab: int, seed: int = 0) -> PackedBatch:
    """Random samples; every token but the last of a sample predicts the next one."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (sum(lengths),), generator=generator)
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    positions = (
        torch.cat([torch.arange(n) for n in lengths]) if lengths else torch.empty(0, dtype=torch.int64)
    )
    targets = [torch.arange(a, b - 1) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    target_positions = torch.cat(targets) if targets else torch.empty(0, dtype=torch.int64)
    return PackedBatch(
        input_ids=ids,
        position_ids=positions,
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
        max_seqlen=max(lengths, default=0),
        segments=tuple(lengths),
        target_positions=target_positions,
        target_ids=ids[target_positions + 1] if lengths else target_positions,
        sample_of_target=torch.repeat_interleave(
            torch.arange(len(lengths)), torch.tensor([n - 1 for n in lengths], dtype=torch.int64)
        ),
    )
