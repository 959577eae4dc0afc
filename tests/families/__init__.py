"""Tiny checkpoints of HF multimodal classes, made by ``save_pretrained``, and configs that train them.

A family is one file and its lines in ``FAMILIES``; every test of families walks that table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from families import gemma3, llava, qwen_audio, qwen_vl, tiled, voxtral
from families.rows import write_rows
from tiny import merged


@dataclass(frozen=True)
class TinyFamily:
    """make: (family, tied embeddings?) -> model, tokenizer, processor. names: prefixes of tensors that
    ``save_pretrained`` writes -> those that other releases wrote. media: what its rows hold. layouts:
    those of ``make test`` (``make test-full`` has all). seconds: of the longest clip."""

    make: Callable[[str, bool], tuple[Any, Any, Any]]
    names: Mapping[str, str]
    media: tuple[str, ...] = ("image",)
    layouts: tuple[str, ...] = ("pp2",)
    seconds: float = 1.0

    @property
    def towers(self) -> tuple[str, ...]:
        """Sections of ``omni.encoders``."""
        return tuple(dict.fromkeys("audio" if medium == "audio" else "vision" for medium in self.media))


FAMILIES = {
    "qwen2_vl": TinyFamily(qwen_vl.qwen, qwen_vl.NAMES, media=("image", "video")),
    "qwen2_5_vl": TinyFamily(qwen_vl.qwen, qwen_vl.NAMES, media=("image", "video")),
    "llava": TinyFamily(llava.llava, llava.CLIP_NAMES),
    "llava_siglip": TinyFamily(llava.llava, llava.SIGLIP_NAMES),
    "llava_onevision": TinyFamily(tiled.onevision, tiled.ONEVISION_NAMES, media=("image", "video")),
    "internvl": TinyFamily(
        tiled.internvl, tiled.INTERNVL_NAMES, media=("image", "video"), layouts=("pp2tp2",)
    ),
    "internvl_llama": TinyFamily(tiled.internvl, tiled.INTERNVL_NAMES, layouts=()),
    "qwen2_audio": TinyFamily(qwen_audio.qwen_audio, qwen_audio.NAMES, media=("audio",)),
    "gemma3": TinyFamily(gemma3.gemma3, gemma3.NAMES, layouts=("pp2sp2",)),
    "voxtral": TinyFamily(voxtral.voxtral, qwen_audio.NAMES, media=("audio",), layouts=("sp2",), seconds=2.6),
}


def make_model(
    family: str, folder: Path, *, tied: bool = False, seed: int = 5, dtype: str = "float32"
) -> Path:
    """Save a random tiny model of a family (a key of ``FAMILIES``) with tokenizer and processor."""
    import torch

    torch.manual_seed(seed)
    model, tokenizer, processor = FAMILIES[family].make(family, tied)
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


def rows_of(family: str, folder: Path, count: int = 16) -> Path:
    """:func:`write_rows` for what a family takes."""
    return write_rows(folder, count, FAMILIES[family].media, FAMILIES[family].seconds)


def tower_of(family: str) -> str:
    return FAMILIES[family].towers[0]


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


def other_names(family: str, folder: Path) -> None:
    """Rename the tensors of a checkpoint to those of other releases, and add a buffer that old ones have."""
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = {}
    for name, value in load_file(file).items():
        prefixes = [new for new in FAMILIES[family].names if name.startswith(new)]
        old = prefixes[0] if prefixes else ""
        tensors[FAMILIES[family].names.get(old, "") + name.removeprefix(old)] = value
    layer = next(name for name in tensors if name.endswith("layers.0.self_attn.q_proj.weight"))
    tensors[layer.replace("q_proj.weight", "rotary_emb.inv_freq")] = torch.arange(4.0)
    save_file(tensors, file, metadata={"format": "pt"})
