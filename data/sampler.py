"""Which rows make up which global batch: a function of sizes, weights, seed and step."""

import math
from collections.abc import Sequence

import numpy as np

from omni_ds.errors import UserError

_BLOCK = 1024  # steps whose draws from the sets are made at once


class ShuffledStream:
    """Rows 0 .. size-1, again and again, each epoch in its own order.

    Near each other no row comes twice: an epoch does not begin with rows that the previous one ended with, as
    far as `size` leaves a choice. window: how near, in draws; aligned: draws are read in windows from the
    start on, so that only the window across the border of two epochs matters.
    """

    def __init__(self, size: int, seed: Sequence[int], window: int, aligned: bool):
        self.size, self.seed, self.window, self.aligned = size, tuple(seed), window, aligned
        self._orders: dict[int, np.ndarray] = {}

    def take(self, start: int, count: int) -> np.ndarray:
        """Rows number start .. start+count-1 of the stream, int64."""
        parts = []
        while count:
            epoch, offset = divmod(start, self.size)
            part = self._order(epoch)[offset : offset + count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def _order(self, epoch: int) -> np.ndarray:
        if (
            self.size < 3 * self.window
        ):  # each order depends on the one before: made in turn, all kept (small)
            while len(self._orders) <= epoch:
                made = len(self._orders)
                self._orders[made] = self._made(made, self._orders.get(made - 1))
        elif epoch not in self._orders:
            # The exchange at the beginning of the previous epoch cannot reach its end.
            before = self._permutation(epoch - 1) if epoch else None
            self._orders = {key: order for key, order in self._orders.items() if key == epoch - 1}
            self._orders[epoch] = self._made(epoch, before)
        return self._orders[epoch]

    def _made(self, epoch: int, before: np.ndarray | None) -> np.ndarray:
        order = self._permutation(epoch)
        tail, head = self._spread(epoch)
        return order if before is None or not head else _avoiding(order, before[-tail:], head)

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([*self.seed, epoch]).permutation(self.size)

    def _spread(self, epoch: int) -> tuple[int, int]:
        """(tail, head): the first `head` rows of the epoch shall not be among the last `tail` before."""
        if not self.aligned:
            near = min(self.window, self.size // 2)
            return near, near
        tail = min(epoch * self.size % self.window, self.size)
        return tail, min(self.window - tail, self.size - tail) if tail else 0


def _avoiding(order: np.ndarray, avoided: np.ndarray, head: int) -> np.ndarray:
    """The order with its first `head` rows taken from those not avoided; otherwise unchanged."""
    allowed = ~np.isin(order, avoided)
    first = np.flatnonzero(allowed)[:head]
    rest = np.ones(len(order), dtype=bool)
    rest[first] = False
    return np.concatenate([order[first], order[rest]])


class GlobalBatchSampler:
    """Rows of each global batch, in draw order, with random access by step.

    sizes: rows of each set; row numbers run through the sets in order. weights: relative shares of the draws;
    when they are all equal the sets are concatenated and every row is drawn once per epoch. With different
    weights each draw picks a set at random, and each set goes through its own epochs. Rows of one batch are
    distinct wherever the sizes allow it.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] | None, batch_size: int, seed: int):
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
                ShuffledStream(size, (seed, 1 + number), batch_size, aligned=False)
                for number, size in enumerate(sizes)
            ]
            self._counts = [np.zeros(len(sizes), dtype=np.int64)]  # draws from each set before each block
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
        """Steps after which `epochs` times as many samples as there are rows have been drawn."""
        return math.ceil(epochs * sum(self.sizes) / self.batch_size - 1e-9)
