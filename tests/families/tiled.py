"""LLaVA-OneVision and InternVL, tiny: images as tiles."""

from __future__ import annotations

from typing import Any

from families.common import TEXT, make_tokenizer

_ONEVISION_TEMPLATE = """{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') -%}
{{- '<image>' -}}
{%- endfor -%}
{%- for part in message['content'] | selectattr('type', 'equalto', 'video') -%}
{{- '<video>' -}}
{%- endfor -%}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') -%}
{{- '\n' + part['text'] -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
_INTERNVL_TEMPLATE = """{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- '<IMG_CONTEXT>\n' -}}
{%- elif part['type'] == 'video' -%}{{- '<video>\n' -}}
{%- else -%}{{- part['text'] -}}
{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
_INTERNVL_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}


def onevision(family: str, tied: bool):
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        Qwen2Config,
        SiglipVisionConfig,
    )
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )

    tokenizer = make_tokenizer(["<image>", "<video>"], _ONEVISION_TEMPLATE)
    pinpoints = [[16 * high, 16 * wide] for high in (1, 2, 3) for wide in (1, 2, 3)]
    vision = SiglipVisionConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
        vision_use_head=False,
    )
    config = LlavaOnevisionConfig(
        vision_config=vision,
        text_config=Qwen2Config(**TEXT, tie_word_embeddings=tied),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=pinpoints,
        vision_aspect_ratio="anyres_max_4",
        tie_word_embeddings=tied,
    )
    processor = LlavaOnevisionImageProcessorPil(
        size={"height": 16, "width": 16}, image_grid_pinpoints=pinpoints
    )
    return LlavaOnevisionForConditionalGeneration(config), tokenizer, processor


def internvl(family: str, tied: bool):
    import torch
    from transformers import (
        InternVLConfig,
        InternVLForConditionalGeneration,
        InternVLVisionConfig,
        LlamaConfig,
        Qwen3Config,
    )
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    tokenizer = make_tokenizer(list(_INTERNVL_TOKENS.values()), _INTERNVL_TEMPLATE)
    tokenizer._set_model_specific_special_tokens(_INTERNVL_TOKENS)
    other = family == "internvl_llama"  # the other choices of the tower, as in the 6B one
    sizes: dict[str, Any] = (
        {"norm_type": "rms_norm", "use_qk_norm": True} if other else {"attention_bias": True}
    )
    vision = InternVLVisionConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
        use_mean_pooling=not other,
        **sizes,
    )
    text = LlamaConfig(**TEXT) if other else Qwen3Config(**TEXT, head_dim=8)
    text.tie_word_embeddings = tied
    config = InternVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=tied,
    )
    model = InternVLForConditionalGeneration(config)
    with torch.no_grad():  # HF's are constant, which hides errors
        for name, parameter in model.model.vision_tower.named_parameters():
            if name.startswith("embeddings.") and parameter.dim() == 3 or "lambda" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    processor = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=5)
    return model, tokenizer, processor


ONEVISION_NAMES = {  # the tower as on the hub, the newline as the class has it today
    "vision_tower.": "vision_tower.vision_model.",
    "image_newline": "model.image_newline",
}
INTERNVL_NAMES = {
    "language_model.model.": "model.language_model.",
    "language_model.": "",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
