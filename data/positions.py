"""Positions of a sample's tokens, from its numbers alone."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from omni_ds.plan.sample import SampleMeta

Positions = Callable[[SampleMeta], np.ndarray]
"""int64 [tokens], or [k, tokens] of k kinds."""


def sequence_positions(meta: SampleMeta) -> np.ndarray:
    """0, 1, 2, ..."""
    return np.arange(meta.tokens)


class GridPositions:
    """[3, tokens]: time, height and width, as `get_rope_index` of Qwen2-VL and Qwen2.5-VL numbers them
    (mrope).

    All three count on over text. A feature row has its step in the grid as time, and its place in its frame
    as height and width; the text behind it goes on after the larger side. Of a video, each run of
    placeholders begins anew and has an equal share of the steps. Rows of encoders without a grid count as
    text.

    grids: encoder -> its numbers: `side`, pixels of a grid cell; `tokens_per_second`, time positions that a
    second of video has, 0 where each step has one.
    """

    def __init__(self, grids: Mapping[str, Any]):
        self.grids = dict(grids)

    def __call__(self, meta: SampleMeta) -> np.ndarray:
        pieces, token, position = [], 0, 0

        def text(stop: int) -> None:
            nonlocal position
            pieces.append(np.tile(np.arange(stop - token) + position, (3, 1)))
            position += stop - token

        runs = [(span, item) for item in meta.items if item.encoder in self.grids for span in item.spans]
        for (start, length), item in sorted(runs, key=lambda run: run[0]):
            text(start)
            numbers = self.grids[item.encoder]
            rows, columns = (pixels // numbers.side for pixels in item.shape[-2:])
            steps, rest = divmod(length, rows * columns)
            assert not rest, f"{length} rows for grids of {rows} x {columns}"
            grid = np.indices((steps, rows, columns), dtype=np.int64).reshape(3, -1)
            if len(item.shape) == 3:
                grid[0] = _times(steps, item.seconds, numbers.tokens_per_second)[grid[0]]
            pieces.append(grid + position)
            token, position = start + length, position + max(rows, columns)
        text(meta.tokens)
        return np.concatenate(pieces, axis=1)


def _times(steps: int, seconds: float, tokens_per_second: float) -> np.ndarray:
    """Positions in time of the steps of a video's grid, int64; in float32, as HF multiplies them."""
    if not tokens_per_second:
        return np.arange(steps)
    interval = np.float32(tokens_per_second) * np.float32(seconds)
    return (np.arange(steps, dtype=np.float32) * interval).astype(np.int64)
