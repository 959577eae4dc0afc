"""Qwen3-VL and Qwen3-VL-MoE, tiny: features of two inner layers go into the LLM."""

from __future__ import annotations

from families.common import TEXT, make_tokenizer
from families.qwen_vl import QWEN_TEMPLATE, VISION_TOKENS

_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "rope_theta": 1e4,
    },
    "head_dim": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
_VISION = {
    "depth": 4,
    "num_heads": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1, 2],
}


def qwen3(family: str, tied: bool):
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = make_tokenizer(list(VISION_TOKENS.values()), QWEN_TEMPLATE)
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in VISION_TOKENS.items()}
    moe = family == "qwen3_vl_moe"
    stem = "Qwen3VLMoe" if moe else "Qwen3VL"
    config = getattr(transformers, f"{stem}Config")(
        text_config=TEXT | _MROPE | (_EXPERTS if moe else {}),
        vision_config=_VISION,
        tie_word_embeddings=tied,
        **ids,
    )
    model = getattr(transformers, f"{stem}ForConditionalGeneration")(config)
    processor = Qwen2VLImageProcessorPil(
        patch_size=4, size={"shortest_edge": 16 * 16, "longest_edge": 44 * 44}
    )
    return model, tokenizer, processor


NAMES = {"visual.": "model.visual.", "language_model.": "model.language_model."}  # a base model's


def transposed(name: str, value):
    """Experts as the hub has them."""
    return value.transpose(1, 2).contiguous() if "mlp.experts." in name else value
