"""Tiny checkpoints of HF multimodal classes, made by ``save_pretrained``, and configs that train them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny import DIGITS, merged

_TEXT = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
_VISION_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_QWEN_TEMPLATE = """{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{{- part['text'] -}}
{%- elif part['type'] == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def _tokenizer(tokens: list[str], template: str):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DIGITS / "tokenizer")
    tokenizer.add_special_tokens({"additional_special_tokens": tokens}, replace_extra_special_tokens=False)
    tokenizer.chat_template = template
    return tokenizer


def _qwen(family: str, tied: bool):
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = _tokenizer(list(_VISION_TOKENS.values()), _QWEN_TEMPLATE)
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in _VISION_TOKENS.items()}
    vision: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": 4}
    if family == "qwen2_5_vl":
        config, model = Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
        vision |= {"hidden_size": 24, "intermediate_size": 40, "out_hidden_size": 32}
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    else:
        config, model = Qwen2VLConfig, Qwen2VLForConditionalGeneration
        vision |= {"embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2}
    text = _TEXT | _MROPE
    made = model(config(text_config=text, vision_config=vision, tie_word_embeddings=tied, **ids))
    processor = Qwen2VLImageProcessorPil(
        patch_size=4, size={"shortest_edge": 16 * 16, "longest_edge": 44 * 44}
    )
    return made, tokenizer, processor


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


def _llava(family: str, tied: bool):
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        Qwen2Config,
        SiglipVisionConfig,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = _tokenizer(["<image>"], _LLAVA_TEMPLATE)
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
        text_config=text(**_TEXT, tie_word_embeddings=tied),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
        vision_feature_layer=-1 if siglip else -2,
        vision_feature_select_strategy="full" if siglip else "default",
        tie_word_embeddings=tied,
    )
    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return LlavaForConditionalGeneration(config), tokenizer, processor


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


def _qwen_audio(family: str, tied: bool):
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioEncoderConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2Config,
        WhisperFeatureExtractor,
    )

    tokenizer = _tokenizer(["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"], _AUDIO_TEMPLATE)
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
        text_config=Qwen2Config(**_TEXT, tie_word_embeddings=tied),
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        tie_word_embeddings=tied,
    )
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    return Qwen2AudioForConditionalGeneration(config), tokenizer, extractor


MAKERS = {
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "llava": _llava,
    "llava_siglip": _llava,
    "qwen2_audio": _qwen_audio,
}
AUDIO = ("qwen2_audio",)


def make_model(
    family: str, folder: Path, *, tied: bool = False, seed: int = 5, dtype: str = "float32"
) -> Path:
    """Save a random tiny model of a family (a key of ``MAKERS``) with tokenizer and processor."""
    import torch

    torch.manual_seed(seed)
    model, tokenizer, processor = MAKERS[family](family, tied)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (
                name.endswith("bias") or "norm" in name or "ln_q" in name
            ):  # HF's are constant, which hides errors
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def write_rows(folder: Path, count: int = 16, modality: str = "image") -> Path:
    """Rows of text alone, of one picture or clip, and of two of different sizes; returns the file."""
    import numpy as np
    import soundfile
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    rows = []
    for number in range(count):
        media = []
        for nth in range(number % 3):
            height, width = (int(x) for x in rng.integers(14, 60, 2))
            name = f"{number}-{nth}.{'png' if modality == 'image' else 'wav'}"
            if modality == "image":
                Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(folder / name)
            else:  # up to a whole window of one second
                seconds = 1.0 if height > 50 else width / 60
                soundfile.write(folder / name, rng.uniform(-0.5, 0.5, int(16000 * seconds)), 16000)
            media.append(name)
        tag = f"<{modality}>"
        question = "".join(f"{tag}Which digit {nth}? " for nth in range(len(media))) or "What is 3 + 4?"
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": ["seven", "It is three.", "two and one"][number % 3]},
        ]
        if number % 4 == 3:
            messages += [
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": "Yes, it is."},
            ]
        rows.append({"messages": messages} | ({f"{modality}s": media} if media else {}))
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(family: str, folder: Path, count: int = 16) -> Path:
    """:func:`write_rows` for what a family takes."""
    return write_rows(folder, count, "audio" if family in AUDIO else "image")


def tower_of(family: str) -> str:
    return "audio" if family in AUDIO else "vision"


def model_config(model: Path, rows: Path, output: Path, tower: str = "vision", **omni: Any) -> dict[str, Any]:
    """A configuration that trains a checkpoint: clipping active, three learning rates."""
    raw: dict[str, Any] = {
        "train_batch_size": 8,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-4}},
        "zero_optimization": {"stage": 1},
        "pipeline": {"stages": 1},
        "omni": {
            "model": {"path": str(model)},
            "encoders": {tower: {"lr": 5e-4, "projector": {"lr": 2e-3}}},
            "data": {
                "train": [{"path": str(rows)}],
                "max_length": 512,
                "max_tokens_per_micro_batch": 512,
                "num_workers": 0,
                "cache_dir": str(output / "cache"),
            },
            "train": {"max_steps": 3, "seed": 7},
            "output_dir": str(output),
        },
    }
    raw["omni"] = merged(raw["omni"], omni)
    return raw


# Names that save_pretrained writes -> names that other releases wrote.
_OTHER_NAMES = {
    "qwen2_vl": {"visual.": "model.visual.", "model.": "model.language_model."},
    "qwen2_5_vl": {"visual.": "model.visual.", "model.": "model.language_model."},
    "llava": {"vision_tower.": "vision_tower.vision_model."},
    "qwen2_audio": {
        "language_model.model.": "model.language_model.",
        "language_model.": "",
        "audio_tower.": "model.audio_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
    "llava_siglip": {
        "language_model.model.": "model.language_model.",
        "language_model.": "",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
}


def other_names(family: str, folder: Path) -> None:
    """Rename the tensors of a checkpoint to those of other releases, and add a buffer that old ones have."""
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = {}
    for name, value in load_file(file).items():
        prefixes = [new for new in _OTHER_NAMES[family] if name.startswith(new)]
        old = prefixes[0] if prefixes else ""
        tensors[_OTHER_NAMES[family].get(old, "") + name.removeprefix(old)] = value
    layer = next(name for name in tensors if name.endswith("layers.0.self_attn.q_proj.weight"))
    tensors[layer.replace("q_proj.weight", "rotary_emb.inv_freq")] = torch.arange(4.0)
    save_file(tensors, file, metadata={"format": "pt"})
