"""The audio towers of Qwen2.5-Omni and Qwen3-Omni in numbers.

A clip of mel frames is cut into chunks of ``2 * n_window`` frames, the last one shorter. Convolutions halve
the frames of a chunk (rounding up) and see nothing of its neighbours.

- Qwen2.5-Omni: one halving; the tokens of a chunk attend to each other; pairs of a clip's tokens are averaged
  (an odd one at the end is dropped), one linear projects.
- Qwen3-Omni: three halvings of frames and of mel bins; as many chunks as go into ``n_window_infer`` frames
  attend to each other; linear, GELU, linear. A chunk that is a whole clip is convolved at its own length, one
  at the end of a longer clip is padded to a full one: what HF makes of a clip that stands alone in a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from omni_ds.errors import UserError
from omni_ds.plan.encoder_meta import EncoderMeta

# transformers' Qwen2_5OmniAudioEncoderConfig and Qwen3OmniMoeAudioEncoderConfig
_COMMON = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "max_source_positions": 1500,
    "output_dim": 3584,
}
_QWEN2_5 = {"n_window": 100}
_QWEN3 = {"n_window": 50, "n_window_infer": 800, "downsample_hidden_size": 480}
_TOKENS_OF_A_CHUNK = 13  # HF's Qwen3-Omni counts so many, whatever n_window says


def is_qwen3(model_type: str) -> bool:
    """Whether a tower is Qwen3-Omni's."""
    return model_type.startswith("qwen3_omni")


@dataclass(frozen=True)
class OmniAudioMeta(EncoderMeta):
    """See the module. chunk: mel frames of a full one; span: chunks that attend to each other; halvings: by
    how many convolutions of stride 2; pool: tokens averaged to one row; channels: of the convolutions over
    frames and mel bins, 0 where they are over frames."""

    chunk: int = 0
    span: int = 1
    halvings: int = 1
    pool: int = 1

    @classmethod
    def from_config(
        cls, name: str, encoder: Any, hf_config: Mapping[str, Any], llm_hidden: int
    ) -> OmniAudioMeta:
        where, model_type = f"omni.encoders.{name}", hf_config["model_type"]
        qwen3 = is_qwen3(model_type)
        given = {key: value for key, value in hf_config.items() if value is not None}
        config = _COMMON | (_QWEN3 if qwen3 else _QWEN2_5) | given
        if encoder.processor.pad_to_window:
            raise UserError(
                f"{where}.processor.pad_to_window: {model_type} takes clips of their own length; remove "
                "the key"
            )
        hidden, heads, mels = config["d_model"], config["encoder_attention_heads"], config["num_mel_bins"]
        if hidden % heads:
            raise UserError(f"{where}: d_model {hidden} does not divide by encoder_attention_heads {heads}")
        if config["output_dim"] != llm_hidden:
            raise UserError(
                f"{where}: the tower makes rows of {config['output_dim']}, the LLM has width {llm_hidden}; "
                "config.json holds parts of different models"
            )
        layers, intermediate, chunk = (
            config["encoder_layers"],
            config["encoder_ffn_dim"],
            2 * config["n_window"],
        )
        layer = 4 * hidden * hidden + 3 * hidden + 2 * hidden * intermediate + intermediate + 5 * hidden
        if qwen3:
            channels, span = config["downsample_hidden_size"], config["n_window_infer"] // chunk
            stem = 10 * channels + 2 * (9 * channels + 1) * channels
            stem += channels * _halved(mels, 3) * hidden
            layer += hidden  # its keys have a bias
            if span < 1 or _halved(chunk, 3) != _TOKENS_OF_A_CHUNK:
                raise UserError(
                    f"{where}: n_window {config['n_window']} with n_window_infer {config['n_window_infer']} "
                    "is not supported; transformers counts features of a model with n_window 50"
                )
        else:
            channels, span = 0, 1
            stem = (3 * mels + 1 + 3 * hidden + 1) * hidden + 2 * config["output_dim"]
        positions = _halved(chunk, 3 if qwen3 else 1)
        if positions > config["max_source_positions"]:
            raise UserError(
                f"{where}: a chunk has {positions} tokens, max_source_positions is "
                f"{config['max_source_positions']}; config.json is not that of a published model"
            )
        return cls(
            name=name,
            modality="audio",
            family="omni_audio",
            model_type=model_type,
            hidden=hidden,
            layers=layers,
            heads=heads,
            intermediate=intermediate,
            mlp_matrices=2,
            reduction="none",
            factor=1,
            projector_hidden=hidden if qwen3 else 0,
            out_hidden=llm_hidden,
            tower_trainable=not encoder.freeze,
            projector_trainable=not encoder.projector.freeze,
            tower_parameters=stem + layers * layer + 2 * hidden,
            channels=channels,
            mels=mels,
            positions=positions,
            chunk=chunk,
            span=span,
            halvings=3 if qwen3 else 1,
            pool=1 if qwen3 else 2,
        )

    @property
    def projector_parameters(self) -> int:
        inner = (self.hidden + 1) * self.projector_hidden
        return inner + (self.hidden + 1) * self.out_hidden

    @property
    def projector_flops(self) -> tuple[int, int]:
        return 2 * self.hidden * self.projector_hidden, 2 * self.hidden * self.out_hidden

    @property
    def stem_width(self) -> int:
        # Of three convolutions, before and after GELU, and after their padding is set to zero.
        places = 4 * _halved(self.mels, 1) + 2 * _halved(self.mels, 2) + _halved(self.mels, 3)
        return super().stem_width + 3 * self.channels * places

    @property
    def window(self) -> int:
        """Mel frames of a full segment."""
        return self.chunk * self.span

    @property
    def segments_per_slice(self) -> int:
        return self.pool // gcd(self.pool, self.positions * self.span)

    @property
    def shortest_part(self) -> int:
        return self.chunk if self.channels else self.minimal_shape()[0]

    def tokens(self, frames: int) -> int:
        """Of a clip, or of a part of one."""
        full, rest = divmod(frames, self.chunk)
        return full * self.positions + _halved(rest, self.halvings)

    def measure(self, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
        full, rest = divmod(shape[0], self.window)
        segments = (self.positions * self.span,) * full + ((self.tokens(rest),) if rest else ())
        rows = sum(segments) // self.pool
        if not rows:
            raise UserError(
                f"omni.encoders.{self.name}: a clip of {shape[0]} mel frames is too short for one feature; "
                "remove the row"
            )
        return segments, rows

    def minimal_shape(self) -> tuple[int, ...]:
        return (16,) if self.channels else (3,)

    def _first_flops(self, segments: Sequence[int]) -> int:
        tokens = sum(segments)
        if self.channels:
            return 2 * (4 * tokens) * _halved(self.mels, 1) * 9 * self.channels
        return 2 * (2 * tokens) * 3 * self.mels * self.hidden

    def _tower_flops(self, segments: Sequence[int]) -> int:
        tokens = sum(segments)
        if not self.channels:
            return super()._tower_flops(segments) + 2 * tokens * 3 * self.hidden**2
        places = 2 * _halved(self.mels, 2) + _halved(self.mels, 3)
        stem = 9 * self.channels**2 * places + self.channels * _halved(self.mels, 3) * self.hidden
        return super()._tower_flops(segments) + 2 * tokens * stem


def _halved(size: int, times: int) -> int:
    """What ``times`` convolutions of stride 2 leave of ``size``."""
    for _ in range(times):
        size = (size + 1) // 2
    return size
