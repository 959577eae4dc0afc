"""Qwen2-VL and Qwen2.5-VL, tiny."""

from __future__ import annotations

from typing import Any

from families.common import TEXT, make_tokenizer

_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
VISION_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
QWEN_TEMPLATE = """{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{{- part['text'] -}}
{%- elif part['type'] == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def qwen(family: str, tied: bool):
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = make_tokenizer(list(VISION_TOKENS.values()), QWEN_TEMPLATE)
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in VISION_TOKENS.items()}
    vision: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": 4}
    if family == "qwen2_5_vl":
        config, model = Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
        vision |= {"hidden_size": 24, "intermediate_size": 40, "out_hidden_size": 32}
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    else:
        config, model = Qwen2VLConfig, Qwen2VLForConditionalGeneration
        vision |= {"embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2}
    text = TEXT | _MROPE
    made = model(config(text_config=text, vision_config=vision, tie_word_embeddings=tied, **ids))
    processor = Qwen2VLImageProcessorPil(
        patch_size=4, size={"shortest_edge": 16 * 16, "longest_edge": 44 * 44}
    )
    return made, tokenizer, processor


NAMES = {"visual.": "model.visual.", "model.": "model.language_model."}
