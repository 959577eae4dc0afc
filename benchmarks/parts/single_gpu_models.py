"""Models of benchmarks/single_gpu.py, as the JSON of a run."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from benchmarks.parts.shapes import SIGLIP_SO400M, WHISPER_LARGE

SAMPLES = 48
LLM = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
MOE = LLM | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6144,
}
TINY_LLM = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
TINY = {
    "llm": TINY_LLM | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "vision": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    "audio": {"d_model": 32, "encoder_ffn_dim": 64, "encoder_layers": 2, "encoder_attention_heads": 2},
}


QWEN = Path(__file__).resolve().parents[2] / "ds_configs" / "models" / "Qwen2.5-VL-3B-Instruct"
TINY_QWEN = {
    "image_token_id": 1,
    "video_token_id": 2,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "text_config": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
    },
    "vision_config": {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 4,
        "depth": 2,
        "out_hidden_size": 256,
        "fullatt_block_indexes": [1],
    },
}


def configuration(model: str, budget: int, options: argparse.Namespace) -> dict:
    """The JSON of a run; `budget`: tokens of a micro-batch."""
    small = TINY if options.tiny else {"llm": {}, "vision": {}, "audio": {}}
    if model == "qwen":
        return qwen_configuration(budget, options)
    llm = MOE | ({"moe_intermediate_size": 64} if options.tiny else {}) if model == "moe" else LLM
    encoders = {
        "vision": {
            "config": SIGLIP_SO400M | small["vision"],
            "modality": "image",
            "projector": {"reduction": "pixel_shuffle", "factor": 3},
        },
        "audio": {
            "config": WHISPER_LARGE | small["audio"],
            "modality": "audio",
            "projector": {"reduction": "frame_stack", "factor": 4},
        },
    }
    for encoder in encoders.values():
        encoder["freeze"] = model == "frozen"
    parts = {"llm": {"config": llm | small["llm"], "tokenizer": "none"}, "encoders": encoders}
    if options.layers:
        for part in (parts["llm"], *encoders.values()):
            key = "encoder_layers" if "encoder_layers" in part["config"] else "num_hidden_layers"
            layers = min(options.layers, part["config"].get(key, options.layers))
            part["config"] = part["config"] | {key: layers}
    return run_configuration(parts, 4096, budget, options)


def run_configuration(parts: dict, longest: int, budget: int, options: argparse.Namespace) -> dict:
    """parts: keys of `omni` that name the model. longest: tokens of a sample, at most."""
    return {
        "train_batch_size": SAMPLES,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": not options.tiny},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "pipeline": {"stages": 1, "activation_checkpoint_interval": int(options.recompute == "all")},
        "omni": {
            **parts,
            "encoder_parallel": {"recompute": options.recompute != "none"},
            "data": {
                "train": [{"path": "none"}],
                "max_length": longest,
                "max_tokens_per_micro_batch": budget,
            },
            "train": {"max_steps": 1},
            "output_dir": tempfile.mkdtemp(),
        },
    }


def qwen_folder(options: argparse.Namespace) -> Path:
    return Path(tempfile.gettempdir()) / f"single-gpu-qwen-{'small' if options.tiny else '3b'}"


def qwen_configuration(budget: int, options: argparse.Namespace) -> dict:
    """Qwen2.5-VL-3B, from a checkpoint of random weights that is written first."""
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    folder = qwen_folder(options)
    if not (folder / "config.json").is_file():
        values = json.loads((QWEN / "config.json").read_text())
        for key, change in TINY_QWEN.items() if options.tiny else ():
            values[key] = values[key] | change if isinstance(change, dict) else change
        config = AutoConfig.for_model(**values)
        torch.manual_seed(0)  # a GPU's generator else begins anywhere
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            drawn = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
        drawn.save_pretrained(folder)
    longest = budget if options.longest else min(8192, budget)
    return run_configuration({"model": {"path": str(folder)}}, longest, budget, options)
