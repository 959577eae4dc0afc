"""The thinker of Qwen3-Omni, tiny: inside the whole model, with talker and code2wav, or alone."""

from __future__ import annotations

from families.common import TEXT
from families.omni import omni_processors, omni_tokenizer

_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "audio_token_id": "<|audio_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "audio_start_token_id": "<|audio_start|>",
    "audio_end_token_id": "<|audio_end|>",
}
_TEXT = {
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "rope_theta": 1e4,
    },
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_VISION = {
    "depth": 3,
    "num_heads": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
_AUDIO = {
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "num_mel_bins": 16,
    "max_source_positions": 50,
    "n_window": 50,  # HF's arithmetic has 13 tokens for a chunk, whatever this says
    "n_window_infer": 200,
    "downsample_hidden_size": 4,
    "output_dim": 32,
}


def qwen3_omni_moe(family: str, tied: bool):
    import torch
    from transformers import (
        Qwen3OmniMoeConfig,
        Qwen3OmniMoeForConditionalGeneration,
        Qwen3OmniMoeThinkerConfig,
        Qwen3OmniMoeThinkerForConditionalGeneration,
    )

    tokenizer, ids = omni_tokenizer(_TOKENS)
    thinker = Qwen3OmniMoeThinkerConfig(
        text_config=TEXT | _TEXT | {"tie_word_embeddings": tied},
        vision_config=_VISION,
        audio_config=_AUDIO,
        tie_word_embeddings=tied,
        position_id_per_seconds=13,
        **ids,
    )
    processors = omni_processors(4, {})
    if family.endswith("thinker"):
        return Qwen3OmniMoeThinkerForConditionalGeneration(thinker), tokenizer, processors
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 40}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    experts |= {"shared_expert_intermediate_size": 8}
    whole = Qwen3OmniMoeConfig(
        thinker_config=thinker.to_dict(),
        talker_config={
            "text_config": small | heads | experts | {"rope_parameters": _TEXT["rope_parameters"]},
            "code_predictor_config": small | heads | {"num_code_groups": 2},
            "thinker_hidden_size": 32,
            "spatial_merge_size": 2,
            "num_code_groups": 2,
        },
        code2wav_config={
            "codebook_size": 8,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_quantizers": 2,
            "upsample_rates": [2],
            "upsampling_ratios": [2],
            "decoder_dim": 16,
        },
    )
    model = Qwen3OmniMoeForConditionalGeneration(whole)
    for name, parameter in model.talker.named_parameters():
        if ".experts." in name:  # HF's class leaves them as they are in memory
            torch.nn.init.normal_(parameter, std=0.02)
    return model, tokenizer, processors
