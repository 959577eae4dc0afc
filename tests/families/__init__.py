"""Tiny checkpoints of HF multimodal classes, made by ``save_pretrained``, and configs that train them.

A family is one file and its lines in ``FAMILIES``; every test of families walks that table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from families import gemma3, llava, omni, qwen3_omni, qwen3_vl, qwen_audio, qwen_vl, tiled, voxtral
from families.rows import write_rows
from tiny import merged, run_config


@dataclass(frozen=True)
class TinyFamily:
    """make: (family, tied embeddings?) -> model, tokenizer, processor. names: prefixes of tensors that
    ``save_pretrained`` writes -> those that other releases wrote. media: what its rows hold. layouts:
    those of ``make test`` (``make test-full`` has all but ``never``: what does nothing there). experts: its
    LLM has some. values: name and tensor as saved -> the tensor that other releases wrote. seconds: of its
    longest clips. settings: what else its configuration has under ``omni``. long: how several ranks share a
    long medium, in ``slices`` or in ``parts``."""

    make: Callable[[str, bool], tuple[Any, Any, Any]]
    names: Mapping[str, str]
    media: tuple[str, ...] = ("image",)
    layouts: tuple[str, ...] = ("pp2",)
    experts: bool = False
    values: Callable[[str, Any], Any] = lambda name, value: value
    seconds: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    never: tuple[str, ...] = ()
    long: str = "slices"

    @property
    def towers(self) -> tuple[str, ...]:
        """Sections of ``omni.encoders``."""
        return tuple(dict.fromkeys("audio" if medium == "audio" else "vision" for medium in self.media))


FAMILIES = {
    "qwen2_vl": TinyFamily(qwen_vl.qwen, qwen_vl.NAMES, media=("image", "video"), layouts=()),
    "qwen2_5_vl": TinyFamily(qwen_vl.qwen, qwen_vl.NAMES, media=("image", "video"), layouts=("pp2", "whole")),
    "qwen3_vl": TinyFamily(qwen3_vl.qwen3, qwen3_vl.NAMES, media=("image", "video"), layouts=("pp2tp2",)),
    "qwen3_vl_moe": TinyFamily(
        qwen3_vl.qwen3,
        qwen3_vl.NAMES,
        media=("image", "video"),
        layouts=("pp2ep2",),
        experts=True,
        values=qwen3_vl.transposed,
    ),
    "llava": TinyFamily(llava.llava, llava.CLIP_NAMES),
    "llava_siglip": TinyFamily(llava.llava, llava.SIGLIP_NAMES, layouts=()),
    "llava_onevision": TinyFamily(
        tiled.onevision, tiled.ONEVISION_NAMES, media=("image", "video"), never=("gangs",)
    ),
    "internvl": TinyFamily(
        tiled.internvl, tiled.INTERNVL_NAMES, media=("image", "video"), layouts=("pp2tp2",), long="parts"
    ),
    "internvl_llama": TinyFamily(tiled.internvl, tiled.INTERNVL_NAMES, layouts=(), long="parts"),
    "qwen2_audio": TinyFamily(qwen_audio.qwen_audio, qwen_audio.NAMES, media=("audio",), never=("gangs",)),
    "gemma3": TinyFamily(gemma3.gemma3, gemma3.NAMES, layouts=("pp2sp2",)),
    "voxtral": TinyFamily(
        voxtral.voxtral, qwen_audio.NAMES, media=("audio",), layouts=("sp2",), seconds=2.6, long="parts"
    ),
    "qwen2_5_omni": TinyFamily(
        omni.qwen2_5_omni,
        omni.WHOLE_NAMES,
        ("image", "audio", "video"),
        ("pp2tp2",),
        settings=omni.omni_settings(2.0),
    ),
    "qwen3_omni_moe": TinyFamily(
        qwen3_omni.qwen3_omni_moe,
        omni.WHOLE_NAMES,
        ("image", "audio", "video"),
        ("pp2ep2",),
        experts=True,
        seconds=2.5,
        settings=omni.omni_settings(1.5),  # positions in time are fractions
    ),
}


def known(family: str) -> TinyFamily:
    """Of a name, which may say ``_thinker``: the model inside the family's alone."""
    return FAMILIES[family.removesuffix("_thinker")]


def make_model(
    family: str, folder: Path, *, tied: bool = False, seed: int = 5, dtype: str = "float32"
) -> Path:
    """Save a random tiny model of a family (:func:`known`) with tokenizer and processor."""
    import torch

    torch.manual_seed(seed)
    model, tokenizer, processor = known(family).make(family, tied)
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
    own = known(family)
    sound = own.settings.get("data", {}).get("use_audio_in_video", False)
    return write_rows(folder, count, own.media, own.seconds, sound)


def towers_of(family: str) -> tuple[str, ...]:
    return known(family).towers


def model_config(
    model: Path, rows: Path, output: Path, towers: Sequence[str] = ("vision",), **omni: Any
) -> dict[str, Any]:
    """A configuration that trains a checkpoint, with three learning rates."""
    raw = run_config(output, batch=8, max_length=512, train=[{"path": str(rows)}])
    raw["omni"] |= {
        "model": {"path": str(model)},
        "encoders": {tower: {"lr": 5e-4, "projector": {"lr": 2e-3}} for tower in towers},
    }
    raw["omni"] = merged(raw["omni"], omni)
    return raw


def family_config(family: str, model: Path, rows: Path, output: Path, **omni: Any) -> dict[str, Any]:
    """:func:`model_config` for a family."""
    settings = merged(dict(known(family).settings), omni)
    return model_config(model, rows, output, known(family).towers, **settings)


def other_names(family: str, folder: Path) -> None:
    """Rename the tensors of a checkpoint to those of other releases, and add a buffer that old ones have."""
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = {}
    for name, value in load_file(file).items():
        prefixes = [new for new in known(family).names if name.startswith(new)]
        old = prefixes[0] if prefixes else ""
        value = known(family).values(name, value)
        tensors[known(family).names.get(old, "") + name.removeprefix(old)] = value
    layer = next(name for name in tensors if name.endswith("layers.0.self_attn.q_proj.weight"))
    tensors[layer.replace("q_proj.weight", "rotary_emb.inv_freq")] = torch.arange(4.0)
    save_file(tensors, file, metadata={"format": "pt"})
