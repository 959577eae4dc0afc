"""The vision towers of Qwen2-VL, Qwen2.5-VL and Qwen2.5-Omni in numbers.

An item is an image of any size whose sides are multiples of ``patch * factor``; its segment is the whole
image. A video is a multiple of ``temporal`` frames of one such size; each ``temporal`` of them are a segment.
In Qwen2.5-VL all layers but ``full_layers`` attend inside windows of ``window_side`` x ``window_side``
feature rows. The projector is HF's patch merger: a norm of each token, ``factor`` x ``factor`` tokens joined,
linear, GELU, linear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omni_ds.errors import UserError
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.shards import even_bounds

# transformers' Qwen2VLVisionConfig and Qwen2_5_VLVisionConfig
_COMMON = {
    "depth": 32,
    "hidden_size": 3584,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_PLAIN = {"embed_dim": 1280, "mlp_ratio": 4}
_WINDOWED = {
    "intermediate_size": 3420,
    "window_size": 112,
    "tokens_per_second": 4,
    "fullatt_block_indexes": (7, 15, 23, 31),
    "out_hidden_size": 3584,
}
_EXAMPLE_SIDE = 1008  # pixels: about what Qwen's processors allow at most, 1280 feature rows


def has_windows(model_type: str) -> bool:
    """Whether a tower is Qwen2.5-VL's, or Qwen2.5-Omni's, which is the same."""
    return model_type.startswith(("qwen2_5_vl", "qwen2_5_omni"))


@dataclass(frozen=True)
class QwenVisionMeta(EncoderMeta):
    """See the module. ``temporal``: frames that one patch joins; an image is repeated as often.
    ``window_side`` 0: all layers attend to the whole image. ``tokens_per_second``: positions in time that a
    second of video has; 0: each step of its grid has one."""

    temporal: int = 2
    full_layers: int = 0
    window_side: int = 0
    tokens_per_second: float = 0

    @classmethod
    def from_config(
        cls, name: str, encoder: Any, hf_config: Mapping[str, Any], llm_hidden: int
    ) -> QwenVisionMeta:
        where, model_type = f"omni.encoders.{name}", hf_config["model_type"]
        windows = has_windows(model_type)
        defaults = _COMMON | (_WINDOWED if windows else _PLAIN)
        config = defaults | {key: value for key, value in hf_config.items() if value is not None}
        hidden = config["hidden_size" if windows else "embed_dim"]
        rows_width = config["out_hidden_size" if windows else "hidden_size"]
        patch, factor, layers = config["patch_size"], config["spatial_merge_size"], config["depth"]
        temporal, channels = config["temporal_patch_size"], config["in_channels"]
        if not isinstance(patch, int) or not isinstance(temporal, int):
            raise UserError(
                f"{where}: patches of {patch} x {temporal} are not supported; they are not square"
            )
        if rows_width != llm_hidden:
            raise UserError(
                f"{where}: the tower makes rows of {rows_width}, the LLM has width {llm_hidden}; config.json "
                "holds parts of different models"
            )
        intermediate = config["intermediate_size"] if windows else int(hidden * config["mlp_ratio"])
        matrices, norms = (3, 2) if windows else (2, 4)  # RMSNorm, LayerNorm
        mlp = matrices * hidden * intermediate + (matrices - 1) * intermediate + hidden
        layer = 4 * hidden * hidden + 4 * hidden + mlp + norms * hidden
        full = layers
        if windows:
            full = len({index for index in config["fullatt_block_indexes"] if 0 <= index < layers})
        return cls(
            name=name,
            modality="image",
            family="qwen_vision",
            model_type=model_type,
            hidden=hidden,
            layers=layers,
            heads=config["num_heads"],
            intermediate=intermediate,
            mlp_matrices=matrices,
            reduction="pixel_shuffle",
            factor=factor,
            projector_hidden=hidden * factor**2,
            out_hidden=llm_hidden,
            tower_trainable=not encoder.freeze,
            projector_trainable=not encoder.projector.freeze,
            tower_parameters=channels * temporal * patch**2 * hidden + layers * layer,
            patch=patch,
            channels=channels,
            video=True,
            temporal=temporal,
            tokens_per_second=config["tokens_per_second"] if windows else 0,
            full_layers=full,
            window_side=config["window_size"] // factor // patch if windows else 0,
        )

    @property
    def projector_parameters(self) -> int:
        norm = self.hidden if self.window_side else 2 * self.hidden
        return super().projector_parameters + norm

    @property
    def side(self) -> int:
        """Pixels of the square that one feature row stands for."""
        return self.patch * self.factor

    def measure(self, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
        *frames, height, width = shape
        if height % self.side or width % self.side or not height * width:
            raise UserError(
                f"omni.encoders.{self.name}: {'a video' if frames else 'an image'} of {height} x {width} "
                f"pixels does not divide into squares of {self.side}; resize it before encoding"
            )
        if frames and (frames[0] % self.temporal or not frames[0]):
            raise UserError(
                f"omni.encoders.{self.name}: a video of {frames[0]} frames, of which a patch joins "
                f"{self.temporal}; repeat its last frame"
            )
        steps = frames[0] // self.temporal if frames else 1
        rows = (height // self.side) * (width // self.side)
        return (rows * self.factor**2,) * steps, rows * steps

    @property
    def segments_per_slice(self) -> int:
        return 1

    def part_of(self, shape: Sequence[int], first: int, count: int) -> tuple[int, tuple[int, ...]]:
        start = first * self.temporal
        return start, (min(shape[0] - start, count * self.temporal), *shape[1:])

    @property
    def sliceable(self) -> bool:
        return True

    def slices(self, shape: Sequence[int], ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Cuts between bands of windows: the tokens of a band stand together, as do its feature rows. None
        for a video, which is dealt by its segments."""
        if len(shape) == 3:
            return None
        height, columns, band = shape[0] // self.side, shape[1] // self.side, self.window_side or 1
        bands = -(-height // band)
        if bands < ranks:
            return None
        rows = tuple(min(height, cut * band) * columns for cut in even_bounds(bands, ranks))
        return tuple(row * self.factor**2 for row in rows), rows

    def minimal_shape(self) -> tuple[int, ...]:
        return self.side, self.side

    def example_shape(self, scale: float) -> tuple[int, ...]:
        side = max(1, int(_EXAMPLE_SIDE * scale) // self.side) * self.side
        return side, side

    def example_video(self, scale: float) -> tuple[int, ...]:
        steps = max(1, int(32 * scale) // self.temporal)
        return (steps * self.temporal, *self.example_shape(min(0.5, 2 * scale)))

    def _first_flops(self, segments: Sequence[int]) -> int:
        return 2 * sum(segments) * self.channels * self.temporal * self.patch**2 * self.hidden

    def _attention_flops(self, segments: Sequence[int]) -> int:
        whole = sum(4 * self.hidden * length * length for length in segments)
        window = (self.window_side * self.factor) ** 2
        inside = sum(4 * self.hidden * length * min(length, window) for length in segments)
        return self.full_layers * whole + (self.layers - self.full_layers) * inside
