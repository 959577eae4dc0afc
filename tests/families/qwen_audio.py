"""Qwen2-Audio, tiny."""

from __future__ import annotations

from families.common import TEXT, make_tokenizer

_AUDIO_TEMPLATE = """{%- set clips = namespace(count=0) -%}
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'audio' -%}
{%- set clips.count = clips.count + 1 -%}
{{- 'Audio ' ~ clips.count ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\n' -}}
{%- else -%}{{- part['text'] -}}
{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def qwen_audio(family: str, tied: bool):
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioEncoderConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2Config,
        WhisperFeatureExtractor,
    )

    tokenizer = make_tokenizer(["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"], _AUDIO_TEMPLATE)
    audio = Qwen2AudioEncoderConfig(
        d_model=24,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=40,
        num_mel_bins=16,
        max_source_positions=50,
    )
    config = Qwen2AudioConfig(
        audio_config=audio,
        text_config=Qwen2Config(**TEXT, tie_word_embeddings=tied),
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        tie_word_embeddings=tied,
    )
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    return Qwen2AudioForConditionalGeneration(config), tokenizer, extractor


NAMES = {
    "language_model.model.": "model.language_model.",
    "language_model.": "",
    "audio_tower.": "model.audio_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
