"""Voxtral, tiny. Its windows are one second; rows with longer clips have several."""

from __future__ import annotations

from families.common import TEXT, make_tokenizer

_TEMPLATE = """{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'audio' -%}{{- '[BEGIN_AUDIO][AUDIO]' -}}
{%- else -%}{{- part['text'] -}}
{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def voxtral(family: str, tied: bool):
    from transformers import (
        LlamaConfig,
        VoxtralConfig,
        VoxtralEncoderConfig,
        VoxtralForConditionalGeneration,
        WhisperFeatureExtractor,
    )

    tokenizer = make_tokenizer(["[BEGIN_AUDIO]", "[AUDIO]"], _TEMPLATE)
    audio = VoxtralEncoderConfig(
        hidden_size=16,
        intermediate_size=64,  # four tokens make a feature row
        num_hidden_layers=2,
        num_attention_heads=2,
        num_mel_bins=16,
        max_source_positions=40,
    )
    config = VoxtralConfig(
        audio_config=audio,
        text_config=LlamaConfig(**TEXT, head_dim=12, tie_word_embeddings=tied),
        audio_token_id=tokenizer.convert_tokens_to_ids("[AUDIO]"),
        tie_word_embeddings=tied,
    )
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1, hop_length=200)
    return VoxtralForConditionalGeneration(config), tokenizer, extractor
