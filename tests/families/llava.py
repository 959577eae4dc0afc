"""LLaVA, tiny, with a CLIP or a SigLIP tower."""

from __future__ import annotations

from families.common import TEXT, make_tokenizer

_LLAVA_TEMPLATE = """{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') -%}
{{- '<image>\n' -}}
{%- endfor -%}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') -%}
{{- part['text'] -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def llava(family: str, tied: bool):
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        Qwen2Config,
        SiglipVisionConfig,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = make_tokenizer(["<image>"], _LLAVA_TEMPLATE)
    siglip = family == "llava_siglip"
    tower, text = (SiglipVisionConfig, Qwen2Config) if siglip else (CLIPVisionConfig, LlamaConfig)
    vision = tower(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        **({"vision_use_head": False} if siglip else {"projection_dim": 16}),
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text(**TEXT, tie_word_embeddings=tied),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
        vision_feature_layer=-1 if siglip else -2,
        vision_feature_select_strategy="full" if siglip else "default",
        tie_word_embeddings=tied,
    )
    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return LlavaForConditionalGeneration(config), tokenizer, processor


CLIP_NAMES = {"vision_tower.": "vision_tower.vision_model."}
SIGLIP_NAMES = {
    "language_model.model.": "model.language_model.",
    "language_model.": "",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
