"""An endless shuffled stream of row numbers."""

from collections.abc import Sequence

import numpy as np


class ShuffledStream:
    """Rows 0 .. size-1, again and again, each epoch in its own order.

    Near each other no row comes twice: an epoch does not begin with rows that the previous one ended with, as
    far as `size` leaves a choice. window: how near, in draws; aligned: draws are read in windows from the
    start on, so that only the window across the border of two epochs matters.
    """

    def __init__(self, size: int, seed: Sequence[int], window: int, aligned: bool):
        self._size, self.seed, self.window, self.aligned = size, tuple(seed), window, aligned
        self._orders: dict[int, np.ndarray] = {}

    @property
    def size(self) -> int:
        """Rows of an epoch."""
        return self._size

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
