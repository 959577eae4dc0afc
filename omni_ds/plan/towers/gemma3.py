"""The vision side of Gemma3 in numbers: a SigLIP tower of all layers and its last norm, means of squares of
patches, norm and linear.

An item is an image of the one size that the tower's positions are made for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from omni_ds.errors import UserError
from omni_ds.plan.encoder_geometry import read_geometry
from omni_ds.plan.encoder_meta import EncoderMeta


@dataclass(frozen=True)
class Gemma3VisionMeta(EncoderMeta):
    """See the module. ``factor``: side of the squares; slices and rows are as with pixel_shuffle."""

    @classmethod
    def from_config(
        cls, name: str, encoder: Any, hf_config: Mapping[str, Any], llm_hidden: int
    ) -> Gemma3VisionMeta:
        where, factor = f"omni.encoders.{name}", encoder.projector.factor
        geometry = read_geometry(where, encoder, hf_config)
        side = geometry.image // geometry.patch
        if side % factor:
            raise UserError(
                f"{where}: {side} x {side} patches do not divide into squares of {factor}; config.json is "
                "not of Gemma3"
            )
        return cls(
            name=name,
            modality="image",
            reduction="pixel_shuffle",
            factor=factor,
            projector_hidden=0,
            out_hidden=llm_hidden,
            tower_trainable=not encoder.freeze,
            projector_trainable=not encoder.projector.freeze,
            **asdict(geometry),
        )

    def example_shape(self, scale: float) -> tuple[int, ...]:
        return self.image, self.image

    @property
    def projector_in(self) -> int:
        return self.hidden

    @property
    def projector_parameters(self) -> int:
        return self.hidden + self.hidden * self.out_hidden

    @property
    def projector_flops(self) -> tuple[int, int]:
        return 0, 2 * self.hidden * self.out_hidden
