"""The vision tower of LLaVA-OneVision in numbers: a plain ViT on tiles, whose rows are packed as a picture.

An image that stands alone in its row is (tiles high, tiles wide, height, width), the last two its own size in
pixels. Its tiles are squares of a picture into which it was fitted with padding, and there is one more of
the whole image, which comes first. Behind the projector the rows of the squares are put together, those of
padding cut off, and where they are more than ``max_tiles`` tiles have the picture is resized; each line ends
with a newline row. With tiles high and wide 0 it is the whole image alone, and one newline: so are images of
rows with several. A video is (frames, side, side): each frame is a tile, whose rows are resized to half, and
a newline ends them all.

Formulas: ``pack_image_features`` and ``apply_pooling`` of ``LlavaOnevisionModel`` in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from omni_ds.errors import UserError
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.towers.tiles import TiledMeta

TOWER_TYPE = "llava_onevision_vision"


@dataclass(frozen=True)
class Picture:
    """Rows of an image behind the projector, line by line. top, left: of [side * tiles high, side * tiles
    wide] rows, so many are cut off at either end; lines, columns: what is left, after resizing."""

    top: int
    left: int
    lines: int
    columns: int


@dataclass(frozen=True)
class OneVisionMeta(TiledMeta):
    """See the module."""

    max_tiles: int = 9

    @classmethod
    def from_config(
        cls, name: str, encoder: Any, hf_config: Mapping[str, Any], llm_hidden: int
    ) -> EncoderMeta:
        tower = {key: value for key, value in hf_config.items() if key != "tower_type"}
        plain = EncoderMeta.from_config(name, encoder, tower, llm_hidden)
        pinpoints = hf_config["image_grid_pinpoints"]
        if not pinpoints or any(not side or side % plain.image for sides in pinpoints for side in sides):
            raise UserError(
                f"omni.encoders.{name}: image_grid_pinpoints of config.json are not multiples of the "
                f"tower's image_size {plain.image}"
            )
        area = max(height * width for height, width in pinpoints)
        sizes = asdict(plain) | {"family": "onevision", "video": True}
        most = 1 + area // plain.image**2
        return cls(**sizes, most_tiles=most, max_tiles=hf_config["max_tiles"])

    @property
    def projector_parameters(self) -> int:
        return super().projector_parameters + self.out_hidden

    def tiles(self, shape: Sequence[int]) -> int:
        return shape[0] if len(shape) == 3 else 1 + shape[0] * shape[1]

    @property
    def tile_rows(self) -> int:
        """Rows of a tile behind the projector."""
        return self.grid_side**2

    @property
    def frame_side(self) -> int:
        """Rows along a side of a video's frame."""
        return -(-self.grid_side // 2)

    def measure(self, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
        segments = (self.tile_tokens,) * self.tiles(shape)
        if len(shape) == 3:
            return segments, shape[0] * self.frame_side**2 + 1
        if not shape[0] * shape[1]:
            return segments, self.tile_rows + 1
        picture = self.picture(shape)
        return segments, self.tile_rows + picture.lines * (picture.columns + 1)

    def picture(self, shape: Sequence[int]) -> Picture:
        """What of an image's squares becomes rows. In floats, as HF's processor and model count them."""
        side = self.grid_side
        high, wide, height, width = shape
        lines, columns, top, left = side * high, side * wide, 0, 0
        if width / height > columns / lines:
            top = (lines - int(round(height * (columns / width), 7))) // 2
        else:
            left = (columns - int(round(width * (lines / height), 7))) // 2
        lines, columns = lines - 2 * top, columns - 2 * left
        ratio = math.sqrt(lines * columns / (self.max_tiles * side**2))
        if ratio > 1.1:
            lines, columns = int(lines // ratio), int(columns // ratio)
        return Picture(top, left, lines, columns)

    def minimal_shape(self) -> tuple[int, ...]:
        return 0, 0, self.image, self.image

    def example_shape(self, scale: float) -> tuple[int, ...]:
        side = int(math.sqrt(self.most_tiles) * scale)
        return (side, side, side * self.image, side * self.image) if side else self.minimal_shape()

    def projected_rows(self, tokens: int, rows: int) -> int:
        """The projector comes before cutting and resizing."""
        return tokens // self.tile_tokens * self.tile_rows
