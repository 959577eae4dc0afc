"""The thinker of Qwen2.5-Omni, tiny: inside the whole model, with talker and token2wav, or alone; and what is
the same of Qwen3-Omni."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from families.common import TEXT, make_tokenizer

_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
_TOKENS = {
    "image_token_id": "<|IMAGE|>",
    "video_token_id": "<|VIDEO|>",
    "audio_token_id": "<|AUDIO|>",
    "vision_start_token_id": "<|vision_bos|>",
    "vision_end_token_id": "<|vision_eos|>",
    "audio_start_token_id": "<|audio_bos|>",
    "audio_end_token_id": "<|audio_eos|>",
}
_PARTS = """{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{{- part['text'] -}}
{%- elif part['type'] == 'image' -%}{{- 'vision_start_token_idimage_token_idvision_end_token_id' -}}
{%- elif part['type'] == 'audio' -%}{{- 'audio_start_token_idaudio_token_idaudio_end_token_id' -}}
{%- elif part['type'] == 'video' -%}{{- 'vision_start_token_idvideo_token_idvision_end_token_id' -}}
{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def omni_tokenizer(tokens: dict[str, str]) -> tuple[Any, dict[str, int]]:
    """A tokenizer whose template writes these tokens around media, and their ids by key of the config."""
    template = _PARTS
    for key, token in tokens.items():
        template = template.replace(key, token)
    tokenizer = make_tokenizer(list(tokens.values()), template)
    return tokenizer, {key: tokenizer.convert_tokens_to_ids(token) for key, token in tokens.items()}


def omni_settings(fps: float) -> dict[str, Any]:
    """What a configuration says about videos, which are small and have sound."""
    bounds = {"fps": fps, "video_min_pixels": 16 * 16, "video_max_pixels": 44 * 44}
    return {
        "encoders": {"vision": {"processor": bounds}},
        "data": {"use_audio_in_video": True},
    }


def omni_processors(patch: int, files: dict[str, bytes]) -> Processors:
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image = Qwen2VLImageProcessorPil(
        patch_size=patch, size={"shortest_edge": 16 * 16, "longest_edge": 44 * 44}
    )
    audio = WhisperFeatureExtractor(feature_size=16, chunk_length=4, return_attention_mask=True)
    return Processors(image, audio, files)


class Processors:
    """Image processor and feature extractor in one preprocessor_config.json, as on the hub."""

    def __init__(self, image: Any, audio: Any, files: dict[str, bytes]):
        self.image, self.audio, self.files = image, audio, files

    def save_pretrained(self, folder: Path) -> None:
        values = self.image.to_dict() | self.audio.to_dict()
        (folder / "preprocessor_config.json").write_text(json.dumps(values, indent=2))
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


def qwen2_5_omni(family: str, tied: bool):
    from transformers import (
        Qwen2_5OmniConfig,
        Qwen2_5OmniForConditionalGeneration,
        Qwen2_5OmniThinkerConfig,
        Qwen2_5OmniThinkerForConditionalGeneration,
    )

    tokenizer, ids = omni_tokenizer(_TOKENS)
    thinker = Qwen2_5OmniThinkerConfig(
        text_config=TEXT | _MROPE | {"tie_word_embeddings": tied},
        vision_config={
            "depth": 3,
            "num_heads": 2,
            "patch_size": 4,
            "hidden_size": 24,
            "intermediate_size": 40,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        audio_config={
            "d_model": 24,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 40,
            "num_mel_bins": 16,
            "max_source_positions": 50,
            "n_window": 10,
            "output_dim": 32,
        },
        tie_word_embeddings=tied,
        **ids,
    )
    if family.endswith("thinker"):
        return Qwen2_5OmniThinkerForConditionalGeneration(thinker), tokenizer, omni_processors(4, {})
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 40}
    whole = Qwen2_5OmniConfig(
        thinker_config=thinker.to_dict(),
        talker_config=small
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "embedding_size": 32}
        | _MROPE,
        token2wav_config={
            "dit_config": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "head_dim": 8,
                "emb_dim": 8,
                "num_embeds": 8,
                "mel_dim": 8,
                "enc_emb_dim": 8,
                "enc_dim": 8,
                "enc_channels": [8, 8, 8, 8, 24],
                "enc_attention_channels": 8,
                "enc_se_channels": 8,
            },
            "bigvgan_config": {"mel_dim": 8, "upsample_initial_channel": 64},
        },
    )
    processors = omni_processors(4, {"spk_dict.pt": b"no weights, but voices"})
    return Qwen2_5OmniForConditionalGeneration(whole), tokenizer, processors


# What transformers 5 would write if it did not keep to the names of the hub.
WHOLE_NAMES = {
    "thinker.visual.": "thinker.model.visual.",
    "thinker.audio_tower.": "thinker.model.audio_tower.",
    "thinker.model.": "thinker.model.language_model.",
}
