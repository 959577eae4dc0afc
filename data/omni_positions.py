"""Positions of a sample's tokens in time, height and width where videos have a clock, and may have sound."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from omni_ds.plan.clock import Clock
from omni_ds.plan.sample import Item, SampleMeta


class ClockPositions:
    """[3, tokens], as `get_rope_index` of Qwen2.5-Omni (int64) and Qwen3-Omni (float32) numbers them.

    All three count on over text and over the rows of a clip. Rows of an image or a video have their time, row
    and column; what follows goes on after the largest number. The sound of a video begins with it; what
    follows both goes on after the last run of rows. Of the two tokens before them, as of the two behind,
    Qwen2.5-Omni gives both the same positions.

    grids: encoder -> its numbers: `side`, pixels of a grid cell. Numbers are those of torch: products in
    float32, from the left.
    """

    def __init__(self, grids: Mapping[str, Any], clock: Clock):
        self.grids, self.clock = dict(grids), clock
        self.type = np.int64 if clock.chunk else np.float32

    def __call__(self, meta: SampleMeta) -> np.ndarray:
        pieces, token, position = [], 0, self.type(0)

        def text(stop: int) -> None:
            nonlocal token, position
            steps = np.arange(stop - token, dtype=self.type)
            pieces.append(np.tile(steps + position, (3, 1)))
            token, position = stop, position + self.type(stop - token)

        twins = self.type(1 if self.clock.chunk else 0)
        for item, sound in self._grouped(meta):
            first = item.spans[0][0]
            if sound is not None:
                text(first - 1)
                position = position - twins
            text(first)
            rows = {item.ordinal: self._grid(item) + position}
            if sound is not None:
                rows[sound.ordinal] = np.tile(np.arange(sound.rows, dtype=self.type) + position, (3, 1))
            for (_, length), ordinal in _runs(item, sound):
                run, rows[ordinal] = rows[ordinal][:, :length], rows[ordinal][:, length:]
                pieces.append(run)
                token, position = token + length, run.max() + self.type(1)
            if sound is not None:
                text(token + 1)
                position = position - twins
        text(meta.tokens)
        return np.concatenate(pieces, axis=1)

    def _grouped(self, meta: SampleMeta) -> list[tuple[Item, Item | None]]:
        """Images and videos in their order, the latter with their sounds: which begin where the first run of
        the video ends."""
        sounds = {item.spans[0][0]: item for item in meta.items if item.encoder not in self.grids}
        seen = sorted((i for i in meta.items if i.encoder in self.grids), key=lambda item: item.spans[0])
        return [(item, sounds.get(sum(item.spans[0]))) for item in seen]

    def _grid(self, item: Item) -> np.ndarray:
        """[3, rows] of an image or a video, from 0."""
        side = self.grids[item.encoder].side
        rows, columns = (pixels // side for pixels in item.shape[-2:])
        grid = np.indices((item.rows // (rows * columns), rows, columns)).reshape(3, -1)
        times = np.arange(grid[0, -1] + 1, dtype=np.float32) * np.float32(item.seconds)
        times = (times * np.float32(self.clock.per_second)).astype(self.type)
        return np.concatenate([times[grid[:1]], grid[1:]]).astype(self.type)


def _runs(item: Item, sound: Item | None) -> list[tuple[tuple[int, int], int]]:
    """(span, ordinal of its item) by rising token."""
    items = [item] if sound is None else [item, sound]
    return sorted((span, each.ordinal) for each in items for span in each.spans)
