"""The measured time model, where loader processes can read it.

Workers are forked before anything is measured, so versions reach them through shared memory. A version is
only used from a step on that no worker can have planned yet when it is written.
"""

from collections.abc import Sequence

import torch

from omni_ds.plan.times import TimeBook, TimeModel

CAPACITY = 64


class SharedTimes:
    """A table of versions: written by the training process, read by its loader processes.

    Args:
        keys: every key of a model, with its number of coefficients, in a fixed order.
    """

    def __init__(self, keys: Sequence[tuple[str, int]]):
        self._keys = tuple(keys)
        width = 1 + sum(count for _, count in keys)
        self._table = torch.zeros((CAPACITY, width), dtype=torch.int64).share_memory_()
        self._count = torch.zeros(1, dtype=torch.int64).share_memory_()

    def publish(self, model: TimeModel) -> None:
        """Append a version; ignored when the table is full (the last one stays in use)."""
        position = int(self._count)
        if position == CAPACITY:
            return
        row = [model.from_step]
        for key, count in self._keys:
            values = model.coefficients[key]
            assert len(values) == count
            row += values
        self._table[position] = torch.tensor(row, dtype=torch.int64)
        self._count[0] = position + 1  # last: a reader sees whole versions only

    def at(self, step: int) -> TimeModel | None:
        """The version that plans ``step``."""
        models = []
        for row in self._table[: int(self._count)].tolist():
            coefficients, start = {}, 1
            for key, count in self._keys:
                coefficients[key] = tuple(row[start : start + count])
                start += count
            models.append(TimeModel(row[0], coefficients))
        return TimeBook(models).at(step)
