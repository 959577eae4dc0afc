"""Tower sizes out of the HF config dict of a supported encoder; defaults are those of transformers' config
classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from omni_ds.errors import UserError
from omni_ds.plan.image_size import NAFLEX

# A composite checkpoint (both towers, or encoder and decoder) holds the part we use in this sub-config.
_SUB_CONFIG = {
    "siglip": ("siglip_vision_model", "vision_config"),
    "siglip2": ("siglip2_vision_model", "vision_config"),
    "clip": ("clip_vision_model", "vision_config"),
}

_VIT_DEFAULTS: dict[str, dict[str, Any]] = {
    "siglip_vision_model": {"patch_size": 16, "intermediate_size": 3072, "image_size": 224},
    "siglip2_vision_model": {"patch_size": 16, "intermediate_size": 3072, "num_patches": 256},
    "clip_vision_model": {"patch_size": 32, "intermediate_size": 3072, "image_size": 224},
    "dinov2": {"patch_size": 14, "mlp_ratio": 4, "image_size": 224},
    "dinov2_with_registers": {"patch_size": 16, "mlp_ratio": 4, "image_size": 224, "num_register_tokens": 4},
}
_VIT_COMMON = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_channels": 3}
_WHISPER_DEFAULTS = {
    "d_model": 384,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "num_mel_bins": 80,
    "max_source_positions": 1500,
}

SUPPORTED = ("siglip", "siglip2", *_VIT_DEFAULTS, "clip", "whisper")


@dataclass(frozen=True)
class Geometry:
    """Sizes of a tower as built: up to its feature layer, without pooling head. Meaning as in EncoderMeta."""

    family: str
    model_type: str
    hidden: int
    layers: int
    heads: int
    intermediate: int
    mlp_matrices: int
    tower_parameters: int
    patch: int = 0
    image: int = 0
    channels: int = 0
    prefix: int = 0
    mels: int = 0
    positions: int = 0
    pad_to_window: bool = False


def tower_config(hf_config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(model type, config) of the tower inside the config of a whole checkpoint."""
    model_type = hf_config.get("model_type", "")
    if model_type in _SUB_CONFIG:
        model_type, key = _SUB_CONFIG[model_type]
        return model_type, dict(hf_config.get(key) or {})
    return model_type, dict(hf_config)


def tower_type(hf_config: Mapping[str, Any]) -> str:
    """What kind of tower a config is of: its ``model_type``, unless the whole checkpoint's config says that
    it is used in a way of its own (``ModelFamily.towers``)."""
    return hf_config.get("tower_type") or hf_config.get("model_type", "")


def default_feature_layer(model_type: str) -> int:
    """Index into HF's ``hidden_states`` when the config names none.

    CLIP: -2, as LLaVA-1.5 and ``LlavaConfig`` have it (the last layer serves the CLS token). Others: -1.
    """
    return -2 if model_type == "clip_vision_model" else -1


def used_layers(where: str, model_type: str, layers: int, feature_layer: int | None) -> int:
    """Layers below ``hidden_states[feature_layer]``, where index 0 is the embedding output, as in HF."""
    index = default_feature_layer(model_type) if feature_layer is None else feature_layer
    used = index if index >= 0 else layers + 1 + index
    if not 1 <= used <= layers:
        raise UserError(
            f"{where}.feature_layer is {index}, but the tower has {layers} layers: "
            f"use 1 to {layers}, or -1 (after the last layer) to -{layers}"
        )
    return used


def read_geometry(where: str, encoder: Any, hf_config: Mapping[str, Any]) -> Geometry:
    """Sizes of the tower named by an encoder section; UserError with ``where`` when it is not supported."""
    model_type, config = tower_config(hf_config)
    if model_type == "whisper":
        return _whisper(where, encoder, _WHISPER_DEFAULTS | config)
    if model_type in _VIT_DEFAULTS:
        return _vit(where, encoder, model_type, _VIT_COMMON | _VIT_DEFAULTS[model_type] | config)
    raise UserError(
        f'{where}: encoders of model_type "{model_type}" are not supported; '
        f"supported are {', '.join(SUPPORTED)}"
    )


def _vit(where: str, encoder: Any, model_type: str, config: dict[str, Any]) -> Geometry:
    patch = square_side(where, "patch_size", config["patch_size"])
    if model_type == NAFLEX:  # positions are a square of patches, whatever the size of an image
        image = patch * isqrt(config["num_patches"])
        if image**2 != config["num_patches"] * patch**2:
            raise UserError(f"{where}: num_patches {config['num_patches']} is not a square number")
    else:
        image = square_side(where, "image_size", config["image_size"])
    hidden, heads, channels = config["hidden_size"], config["num_attention_heads"], config["num_channels"]
    if hidden % heads:
        raise UserError(f"{where}: hidden_size {hidden} does not divide by num_attention_heads {heads}")
    layers = used_layers(where, model_type, config["num_hidden_layers"], encoder.feature_layer)
    patches = (image // patch) ** 2
    if not patches:
        raise UserError(f"{where}: image_size {image} is smaller than patch_size {patch}")
    stem = channels * patch**2 * hidden + patches * hidden
    matrices = 2
    if model_type.startswith("dinov2"):
        intermediate = int(hidden * config["mlp_ratio"])
        if config.get("use_swiglu_ffn"):
            intermediate = (int(intermediate * 2 / 3) + 7) // 8 * 8
            matrices = 3
        prefix = 1 + (config["num_register_tokens"] if model_type == "dinov2_with_registers" else 0)
        # convolution bias, CLS and its position, registers, mask token, final norm
        mask = 1 if model_type == "dinov2_with_registers" or config.get("use_mask_token", True) else 0
        extra = (1 + 1 + prefix + mask + 2) * hidden
        attention_bias = hidden * (1 + 3 * bool(config.get("qkv_bias", True)))
        layer_scales = 2 * hidden
    else:
        intermediate = config["intermediate_size"]
        prefix = 1 if model_type == "clip_vision_model" else 0
        # CLIP: class embedding and its position, two norms; SigLIP: convolution bias, one norm
        extra = (6 if prefix else 3) * hidden
        attention_bias, layer_scales = 4 * hidden, 0
    mlp = matrices * hidden * intermediate + (matrices - 1) * intermediate + hidden
    layer = 4 * hidden * hidden + attention_bias + mlp + 4 * hidden + layer_scales
    return Geometry(
        family="vit",
        model_type=model_type,
        hidden=hidden,
        layers=layers,
        heads=heads,
        intermediate=intermediate,
        mlp_matrices=matrices,
        tower_parameters=stem + extra + layers * layer,
        patch=patch,
        image=image,
        channels=channels,
        prefix=prefix,
    )


def _whisper(where: str, encoder: Any, config: dict[str, Any]) -> Geometry:
    if encoder.feature_layer not in (None, -1):
        raise UserError(
            f"{where}.feature_layer is {encoder.feature_layer}: Whisper features are the normalised "
            "output of its last layer; leave the key out"
        )
    hidden, heads, layers = config["d_model"], config["encoder_attention_heads"], config["encoder_layers"]
    if hidden % heads:
        raise UserError(f"{where}: d_model {hidden} does not divide by encoder_attention_heads {heads}")
    mels, positions, intermediate = (
        config["num_mel_bins"],
        config["max_source_positions"],
        config["encoder_ffn_dim"],
    )
    layer = 4 * hidden * hidden + 3 * hidden + 2 * hidden * intermediate + intermediate + hidden + 4 * hidden
    stem = 3 * mels * hidden + 3 * hidden * hidden + 2 * hidden + positions * hidden
    return Geometry(
        family="whisper",
        model_type="whisper",
        hidden=hidden,
        layers=layers,
        heads=heads,
        intermediate=intermediate,
        mlp_matrices=2,
        tower_parameters=stem + layers * layer + 2 * hidden,
        mels=mels,
        positions=positions,
        pad_to_window=bool(encoder.processor.pad_to_window),
    )


def square_side(where: str, key: str, value: Any) -> int:
    """One side of a square given as an int or a pair: position embeddings are interpolated from a square
    grid."""
    sides = {value} if isinstance(value, int) else set(value)
    if len(sides) != 1:
        raise UserError(f"{where}: {key} {value} is not square; the position embeddings of these towers are")
    return sides.pop()
