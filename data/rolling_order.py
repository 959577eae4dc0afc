"""The order of rows that are not all known yet: the first epoch goes block by block."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from data.shuffle import ShuffledStream
from omni_ds.errors import UserError

_KEPT = 2  # orders of blocks in memory


class Growing(Protocol):
    """Usable rows of a source, in blocks that become known one after the other."""

    blocks: int

    def stop(self, block: int) -> int:
        """Usable rows of the blocks up to this one; waits until it is known."""


class RollingStream(ShuffledStream):
    """Rows of several sources, again and again, each epoch in its own order; a row is drawn when the blocks
    that the draw depends on are known.

    The first epoch has as many parts as the source of most blocks has blocks; every part holds its share of
    each source, shuffled. A source of fewer blocks deals each block, shuffled, to the parts that stand in its
    place, so that all sources run through the whole epoch. By the end of it all rows are known, and later
    epochs shuffle all of them. starts: number of each source's first row.
    """

    def __init__(
        self,
        sources: Sequence[Growing],
        starts: Sequence[int],
        seed: Sequence[int],
        window: int,
        aligned: bool,
    ):
        self.sources, self.starts = list(sources), list(starts)
        self.parts = max(source.blocks for source in sources)
        self._part_stops: list[int] = []
        self._part_orders: dict[int, np.ndarray] = {}
        super().__init__(0, seed, window, aligned)

    @property
    def size(self) -> int:
        """Usable rows of an epoch; waits for all blocks."""
        return self._stop(self.parts - 1)

    def take(self, start: int, count: int) -> np.ndarray:
        """Rows number start .. start+count-1 of the stream, int64. UserError when no row can be used."""
        taken = []
        while count and (part := self._part_at(start)) is not None:
            offset = start - (self._stop(part - 1) if part else 0)
            rows = self._part_order(part)[offset : offset + count]
            taken.append(rows)
            start, count = start + len(rows), count - len(rows)
        if count:
            if not self.size:
                raise UserError("omni.data.train: no row of a set can be used")
            taken.append(super().take(start, count))
        return np.concatenate(taken) if taken else np.zeros(0, dtype=np.int64)

    def _part_at(self, draw: int) -> int | None:
        """The part of the first epoch in which a draw falls; None in later epochs."""
        part = bisect_right(self._part_stops, draw)
        while part < self.parts and self._stop(part) <= draw:
            part += 1
        return part if part < self.parts else None

    def _stop(self, part: int) -> int:
        """Draws of the first epoch up to the end of a part."""
        while len(self._part_stops) <= part:
            known = len(self._part_stops)
            spans = [self._span(source, known) for source in self.sources]
            before = self._part_stops[-1] if known else 0
            self._part_stops.append(before + sum(stop - start for start, stop in spans))
        return self._part_stops[part]

    def _block_of(self, source: Growing, part: int) -> tuple[int, int, int]:
        """(block, number of the part among those that share the block, their number)."""
        block = part * source.blocks // self.parts
        first = -(-block * self.parts // source.blocks)
        return block, part - first, -(-(block + 1) * self.parts // source.blocks) - first

    def _span(self, source: Growing, part: int) -> tuple[int, int]:
        """Which of the source's usable rows, in the dealt order of their block, the part holds."""
        block, number, sharing = self._block_of(source, part)
        stop = source.stop(block)
        start = source.stop(block - 1) if block else 0
        size = stop - start
        return start + number * size // sharing, start + (number + 1) * size // sharing

    def _part_order(self, part: int) -> np.ndarray:
        if part not in self._part_orders:
            pieces = [self._piece(number, part) for number in range(len(self.sources))]
            order = np.random.default_rng([*self.seed, 0, 1 + part]).permutation(np.concatenate(pieces))
            for old in list(self._part_orders)[: 1 - _KEPT]:
                del self._part_orders[old]
            self._part_orders[part] = order
        return self._part_orders[part]

    def _piece(self, number: int, part: int) -> np.ndarray:
        source = self.sources[number]
        start, stop = self._span(source, part)
        block, _, sharing = self._block_of(source, part)
        if sharing == 1:
            return np.arange(start, stop, dtype=np.int64) + self.starts[number]
        first = source.stop(block - 1) if block else 0
        dealt = np.random.default_rng([*self.seed, 0, 0, number, block]).permutation(
            source.stop(block) - first
        )
        return dealt[start - first : stop - first] + first + self.starts[number]

    def _permutation(self, epoch: int) -> np.ndarray:
        if not epoch:
            return np.concatenate([self._part_order(part) for part in range(self.parts)])
        sizes = [source.stop(source.blocks - 1) for source in self.sources]
        rows = np.concatenate(
            [
                np.arange(start, start + size, dtype=np.int64)
                for start, size in zip(self.starts, sizes, strict=True)
            ]
        )
        return np.random.default_rng([*self.seed, epoch]).permutation(rows)
