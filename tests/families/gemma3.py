"""Gemma3, tiny: windows shorter than the samples and than an image, a rotation for each type of layer."""

from __future__ import annotations

from families.common import TEXT
from tiny import DIGITS

_TOKENS = {
    "boi_token": "<start_of_image>",
    "image_token": "<image_soft_token>",
    "eoi_token": "<end_of_image>",
}
_TEMPLATE = """{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}{{- message['content'] | trim -}}
{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- '<start_of_image>' -}}
{%- else -%}{{- part['text'] | trim -}}
{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def gemma3(family: str, tied: bool):
    import torch
    from transformers import (
        AutoTokenizer,
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3Processor,
        Gemma3TextConfig,
        SiglipVisionConfig,
    )
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(DIGITS / "tokenizer", extra_special_tokens=_TOKENS)
    tokenizer.chat_template = _TEMPLATE
    vision = SiglipVisionConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=4,
        vision_use_head=False,
    )
    text = Gemma3TextConfig(
        **TEXT | {"pad_token_id": 0},
        head_dim=12,
        query_pre_attn_scalar=20,
        sliding_window=10,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        tie_word_embeddings=tied,
    )
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=16,
        boi_token_index=tokenizer.boi_token_id,
        image_token_index=tokenizer.image_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        tie_word_embeddings=tied,
    )
    pictures = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    processor = Gemma3Processor(pictures, tokenizer, _TEMPLATE, image_seq_length=16)
    model = Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(
        model.model.multi_modal_projector.mm_input_projection_weight, std=0.1
    )  # HF's is zero
    return model, tokenizer, processor


NAMES = {
    "language_model.model.": "model.language_model.",
    "language_model.": "",
    "vision_tower.": "vision_tower.vision_model.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
