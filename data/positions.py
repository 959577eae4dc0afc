"""Positions of a sample's tokens, from its numbers alone."""

from collections.abc import Callable, Mapping

import numpy as np

from omni_ds.plan.sample import SampleMeta

Positions = Callable[[SampleMeta], np.ndarray]
"""int64 [tokens], or [k, tokens] of k kinds."""


def sequence_positions(meta: SampleMeta) -> np.ndarray:
    """0, 1, 2, ..."""
    return np.arange(meta.tokens)


class GridPositions:
    """[3, tokens]: time, height and width, as Qwen2-VL's `get_rope_index` numbers them (mrope).

    All three count on over text. The rows of an image have one time, and their place in its grid as height
    and width; the text behind it goes on after the larger side. sides: encoder -> pixels of a grid cell.
    """

    def __init__(self, sides: Mapping[str, int]):
        self.sides = dict(sides)

    def __call__(self, meta: SampleMeta) -> np.ndarray:
        pieces, token, position = [], 0, 0

        def text(stop: int) -> None:
            nonlocal position
            pieces.append(np.tile(np.arange(stop - token) + position, (3, 1)))
            position += stop - token

        grids = [item for item in meta.items if item.encoder in self.sides]
        for item in sorted(grids, key=lambda item: item.spans[0]):
            ((start, length),) = item.spans
            text(start)
            rows, columns = (pixels // self.sides[item.encoder] for pixels in item.shape)
            grid = np.indices((1, rows, columns), dtype=np.int64).reshape(3, -1)
            assert grid.shape[1] == length, f"{length} rows for a grid of {rows} x {columns}"
            pieces.append(grid + position)
            token, position = start + length, position + max(rows, columns)
        text(meta.tokens)
        return np.concatenate(pieces, axis=1)
