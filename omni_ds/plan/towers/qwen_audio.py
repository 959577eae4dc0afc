"""The audio tower of Qwen2-Audio in numbers: Whisper's encoder, its output averaged in pairs, one linear
projector.

An item is one clip of at most a window. HF pads it with silence and hides the padding from attention, but the
convolutions see the first frames of it; so an item has those: ``REACH`` mel frames more than its sound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from omni_ds.errors import UserError
from omni_ds.plan.encoder_geometry import read_geometry
from omni_ds.plan.encoder_meta import EncoderMeta

REACH = 2
# transformers' Qwen2AudioEncoderConfig
_DEFAULTS = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "max_source_positions": 1500,
}


@dataclass(frozen=True)
class QwenAudioMeta(EncoderMeta):
    """See the module. The shape of an item is (mel frames of its sound + ``REACH``,)."""

    @classmethod
    def from_config(
        cls, name: str, encoder: Any, hf_config: Mapping[str, Any], llm_hidden: int
    ) -> QwenAudioMeta:
        whisper = read_geometry(
            f"omni.encoders.{name}", encoder, _DEFAULTS | dict(hf_config) | {"model_type": "whisper"}
        )
        sizes = asdict(whisper) | {"family": "qwen_audio", "model_type": hf_config["model_type"]}
        return cls(
            name=name,
            modality="audio",
            reduction="none",
            factor=1,
            projector_hidden=0,
            out_hidden=llm_hidden,
            tower_trainable=not encoder.freeze,
            projector_trainable=not encoder.projector.freeze,
            **sizes,
        )

    @property
    def projector_parameters(self) -> int:
        return (self.hidden + 1) * self.out_hidden

    @property
    def projector_flops(self) -> tuple[int, int]:
        return 0, 2 * self.hidden * self.out_hidden

    def measure(self, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
        tokens = (shape[0] - REACH + 1) // 2
        if tokens < 2 or tokens > self.positions:
            raise UserError(
                f"omni.encoders.{self.name}: a clip of {shape[0] - REACH} mel frames; it takes 3 to "
                f"{self.window}"
            )
        return (tokens,), tokens // 2

    def minimal_shape(self) -> tuple[int, ...]:
        return (3 + REACH,)

    def _tower_flops(self, segments: Sequence[int]) -> int:
        return super()._tower_flops(segments) + 2 * sum(segments) * 3 * self.hidden**2
