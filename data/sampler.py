"""Which rows make up which global batch: a function of sizes, weights, seed and step."""

import math
from collections.abc import Sequence

import numpy as np

from data.rolling_order import Growing, RollingStream
from data.shuffle import ShuffledStream
from omni_ds.errors import UserError

_BLOCK = 1024  # steps whose draws from the sets are made at once


class GlobalBatchSampler:
    """Rows of each global batch, in draw order, with random access by step.

    sizes: rows of each set; row numbers run through the sets in order. weights: relative shares of the draws;
    when they are all equal the sets are concatenated and every row is drawn once per epoch. With different
    weights each draw picks a set at random, and each set goes through its own epochs. Rows of one batch are
    distinct wherever the sizes allow it.

    growing: indexes of the sets that are not known yet (`IndexedDataset.growing`); `sizes` then are upper
    bounds, and a step waits for the blocks that it draws from. The order is the same however much is known.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float] | None,
        batch_size: int,
        seed: int,
        growing: Sequence[Growing] | None = None,
    ):
        sizes, weights = list(sizes), list(weights or [1.0] * len(sizes))
        if len(sizes) != len(weights) or not sum(sizes):
            raise UserError("omni.data.train: there is no sample to draw")
        empty = [number for number, size in enumerate(sizes) if not size]
        if empty and len(set(weights)) > 1:
            raise UserError(
                f"omni.data.train[{empty[0]}]: no usable sample, but its weight asks for draws from it"
            )
        self.sizes, self.batch_size, self.seed = sizes, batch_size, seed
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.mixed = len(set(weights)) > 1
        if self.mixed:
            self.limits = np.cumsum(weights) / sum(weights)
            self.streams = [
                RollingStream([growing[number]], [0], (seed, 1 + number), batch_size, aligned=False)
                if growing is not None and growing[number].blocks > 1
                else ShuffledStream(size, (seed, 1 + number), batch_size, aligned=False)
                for number, size in enumerate(sizes)
            ]
            self._counts = [np.zeros(len(sizes), dtype=np.int64)]  # draws from each set before each block
        elif growing is not None:
            starts = self.starts[:-1].tolist()
            self.streams = [RollingStream(growing, starts, (seed, 0), batch_size, aligned=True)]
        else:
            self.streams = [ShuffledStream(sum(sizes), (seed, 0), batch_size, aligned=True)]

    def rows(self, step: int) -> tuple[int, ...]:
        """The `batch_size` rows of global batch `step` (from 0)."""
        if not self.mixed:
            return tuple(self.streams[0].take(step * self.batch_size, self.batch_size).tolist())
        block, within = divmod(step, _BLOCK)
        while len(self._counts) <= block:
            drawn = np.bincount(self._draws(len(self._counts) - 1).ravel(), minlength=len(self.sizes))
            self._counts.append(self._counts[-1] + drawn)
        draws = self._draws(block)
        before = self._counts[block] + np.bincount(draws[:within].ravel(), minlength=len(self.sizes))
        rows = np.empty(self.batch_size, dtype=np.int64)
        for number, stream in enumerate(self.streams):
            chosen = draws[within] == number
            rows[chosen] = self.starts[number] + stream.take(int(before[number]), int(chosen.sum()))
        return tuple(rows.tolist())

    def _draws(self, block: int) -> np.ndarray:
        """Set of each draw, int64 [steps of the block, batch_size]."""
        random = np.random.default_rng([self.seed, 2**31, block]).random((_BLOCK, self.batch_size))
        return np.minimum(np.searchsorted(self.limits, random, side="right"), len(self.sizes) - 1)

    def total_steps(self, epochs: float) -> int:
        """Steps after which `epochs` times as many samples as there are rows have been drawn. Rows of growing
        sets count before it is known whether they can be used.
        """
        return math.ceil(epochs * sum(self.sizes) / self.batch_size - 1e-9)
