"""A tiny composition on the bundled digits: HF checkpoints in a folder, and a config that trains them."""

import copy
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DIGITS = ROOT / "data" / "digits"


# Language models by name: what differs from the smallest one, which has 4 heads on 2 key-value heads.
LLMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "uneven": {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 45,
        "vocab_size": 353,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "output_router_logits": True,
        "router_aux_loss_coef": 0.05,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}


def llm_config(name: str, vocabulary: int, tied: bool = False):
    """A tiny HF configuration of the family that ``LLMS[name]`` asks for."""
    from transformers import MixtralConfig, Qwen3Config, Qwen3MoeConfig

    cls = {"qwen3_moe": Qwen3MoeConfig, "mixtral": MixtralConfig}.get(name, Qwen3Config)
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": tied,
        "initializer_range": 0.05,
    }
    return cls(**(sizes | LLMS[name]))


def make_checkpoints(
    folder: Path, *, tied: bool = False, llm: str = "dense", seed: int = 5, positions: int = 100
) -> None:
    """Save random LLM (:data:`LLMS`), SigLIP and Whisper checkpoints of the real classes under ``folder``.

    positions: tokens of a full Whisper window, a fiftieth of a second each; digits take up to a second.
    """
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        SiglipVisionConfig,
        SiglipVisionModel,
        WhisperConfig,
        WhisperModel,
    )

    tokenizer = AutoTokenizer.from_pretrained(DIGITS / "tokenizer")
    torch.manual_seed(seed)
    language = AutoModelForCausalLM.from_config(llm_config(llm, len(tokenizer), tied))
    vision = SiglipVisionConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        vision_use_head=False,
    )
    audio = WhisperConfig(
        d_model=24,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=32,
        num_mel_bins=16,
        max_source_positions=positions,
        vocab_size=64,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
    )
    for name, model in (
        ("llm", language),
        ("vision", SiglipVisionModel(vision)),
        ("audio", WhisperModel(audio)),
    ):
        model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / "llm")


def run_config(output: Path, *, batch: int, max_length: int, train: list[dict[str, Any]]) -> dict[str, Any]:
    """What all tiny runs share: three steps, clipping active, an eps that keeps gradients of zero up to
    rounding from becoming steps of full size. Lacks the model: ``llm`` and ``encoders``, or ``model``."""
    return {
        "train_batch_size": batch,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-4}},
        "zero_optimization": {"stage": 1},
        "pipeline": {"stages": 1},
        "omni": {
            "data": {
                "train": train,
                "max_length": max_length,
                "max_tokens_per_micro_batch": max_length,
                "num_workers": 0,
                "cache_dir": str(output / "cache"),
            },
            "train": {"max_steps": 3, "seed": 7},
            "output_dir": str(output),
        },
    }


def config_dict(checkpoints: Path, output: Path, **omni: Any) -> dict[str, Any]:
    """A configuration that trains :func:`make_checkpoints` on a few digits, with three rates."""
    sets = ("written", "spoken", "sum", "text")
    train = [{"path": str(DIGITS / f"train_{name}.jsonl"), "max_samples": 24} for name in sets]
    raw = run_config(output, batch=12, max_length=256, train=train)
    raw["omni"] |= {
        "llm": {"path": str(checkpoints / "llm")},
        "encoders": {
            "vision": {
                "path": str(checkpoints / "vision"),
                "modality": "image",
                "lr": 5e-4,
                "projector": {"reduction": "pixel_shuffle", "factor": 2, "lr": 2e-3},
            },
            "audio": {
                "path": str(checkpoints / "audio"),
                "modality": "audio",
                "lr": 5e-4,
                "projector": {"reduction": "frame_stack", "factor": 4, "lr": 2e-3},
            },
        },
    }
    raw["omni"] = merged(raw["omni"], omni)
    return raw


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with nested ``changes``; neither is modified."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if nested else copy.deepcopy(value)
    return result


def write_config(raw: dict[str, Any], path: Path) -> Path:
    path.write_text(json.dumps(raw))
    return path
