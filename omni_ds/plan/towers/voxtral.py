"""The audio tower of Voxtral in numbers: Whisper's encoder on full windows, whose tokens are joined in fours.

An item is a clip of any length, filled with silence up to whole windows, as HF does; each window is a
segment. The projector has no biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from omni_ds.errors import UserError
from omni_ds.plan.encoder_geometry import read_geometry
from omni_ds.plan.encoder_meta import EncoderMeta

# Whisper's name of a size -> (Voxtral's, the default of transformers' VoxtralEncoderConfig)
_SIZES = {
    "num_mel_bins": ("num_mel_bins", 128),
    "encoder_layers": ("num_hidden_layers", 32),
    "encoder_attention_heads": ("num_attention_heads", 20),
    "encoder_ffn_dim": ("intermediate_size", 5120),
    "d_model": ("hidden_size", 1280),
    "max_source_positions": ("max_source_positions", 1500),
}


def joined_tokens(hf_config: Mapping[str, Any]) -> int:
    """Tower tokens in one feature row: HF views the hidden states as rows of ``intermediate_size``."""
    (_, width), (_, wide) = _SIZES["d_model"], _SIZES["encoder_ffn_dim"]
    hidden, row = hf_config.get("hidden_size", width), hf_config.get("intermediate_size", wide)
    positions = hf_config.get("max_source_positions", _SIZES["max_source_positions"][1])
    if row % hidden or positions % (row // hidden):
        raise UserError(
            f"omni.model.path: rows of intermediate_size {row} do not hold whole tokens of hidden_size "
            f"{hidden}, or do not divide a window of {positions}; config.json is not Voxtral's"
        )
    return row // hidden


@dataclass(frozen=True)
class VoxtralMeta(EncoderMeta):
    """See the module. The shape of an item is (mel frames,), whole windows."""

    @classmethod
    def from_config(
        cls, name: str, encoder: Any, hf_config: Mapping[str, Any], llm_hidden: int
    ) -> VoxtralMeta:
        sizes = {ours: hf_config.get(theirs, default) for ours, (theirs, default) in _SIZES.items()}
        geometry = read_geometry(f"omni.encoders.{name}", encoder, sizes | {"model_type": "whisper"})
        return cls(
            name=name,
            modality="audio",
            reduction="frame_stack",
            factor=joined_tokens(hf_config),
            projector_hidden=llm_hidden,
            out_hidden=llm_hidden,
            tower_trainable=not encoder.freeze,
            projector_trainable=not encoder.projector.freeze,
            **asdict(geometry) | {"model_type": hf_config["model_type"], "pad_to_window": True},
        )

    @property
    def projector_parameters(self) -> int:
        return (self.projector_in + self.out_hidden) * self.projector_hidden
