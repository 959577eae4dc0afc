"""What towers have in common that encode an image as tiles: squares of one size, each a segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omni_ds.plan.encoder_meta import EncoderMeta


@dataclass(frozen=True)
class TiledMeta(EncoderMeta):
    """Tiles have ``image`` x ``image`` pixels, the tower's native size. ``most_tiles``: of an image, at most
    about; for made-up samples."""

    most_tiles: int = 1

    @property
    def grid_side(self) -> int:
        """Patches along a side of a tile."""
        return self.image // self.patch

    @property
    def tile_tokens(self) -> int:
        """Tower tokens of a tile."""
        return self.prefix + self.grid_side**2

    def tiles(self, shape: Sequence[int]) -> int:
        """Of an item."""
        return shape[0]

    @property
    def sliceable(self) -> bool:
        return False

    def slices(self, shape: Sequence[int], ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        return None

    def _first_flops(self, segments: Sequence[int]) -> int:
        patches = len(segments) * self.grid_side**2
        return 2 * patches * self.channels * self.patch**2 * self.hidden
