"""Where a stored piece of a parameter and a wanted one meet, as windows into their flat storage.

A piece is a range of the flattened region that a rank holds. ZeRO cuts such ranges anywhere, tensor and
expert parallelism cut regions by rows and columns; both come apart into rectangles of the whole parameter,
and rectangles meet in rectangles. No element is looked at alone.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from omni_ds.plan.region import Region


@dataclass(frozen=True)
class Piece:
    """Elements [offset, offset + length) of ``region``, flattened row by row."""

    region: Region
    offset: int
    length: int


@dataclass(frozen=True)
class Window:
    """A rectangle inside flat storage: ``height`` rows of ``stride`` elements from ``start`` on, of which
    ``width`` from ``column`` on belong to it."""

    start: int
    height: int
    stride: int
    column: int
    width: int

    @property
    def stop(self) -> int:
        """End of the storage range that ``view`` needs."""
        return self.start + self.height * self.stride

    def view(self, flat: Tensor, origin: int = 0) -> Tensor:
        """The window [height, width] of ``flat``, whose first element is number ``origin`` of the piece."""
        rows = flat[self.start - origin : self.stop - origin].view(self.height, self.stride)
        return rows[:, self.column : self.column + self.width]


def meetings(wanted: Piece, stored: Piece) -> Iterator[tuple[Window, Window]]:
    """(window of wanted, window of stored) for every rectangle that both hold."""
    if wanted.region.intersect(stored.region) is None:
        return
    theirs = list(stored.region.runs(stored.offset, stored.length))
    for mine, at in wanted.region.runs(wanted.offset, wanted.length):
        for other, start in theirs:
            met = mine.intersect(other)
            if met is not None:
                yield _window(mine, at, met), _window(other, start, met)


def _window(run: Region, start: int, met: Region) -> Window:
    start += (met.rows[0] - run.rows[0]) * run.width
    column = met.columns[0] - run.columns[0]
    if met.height == 1:  # part of a row needs no more than itself
        return Window(start + column, 1, met.width, 0, met.width)
    return Window(start, met.height, run.width, column, met.width)


def covers(length: int, windows: Iterable[Window]) -> bool:
    """Whether windows into a piece of ``length`` elements hold every one of them exactly once."""
    windows = list(windows)
    if sum(window.height * window.width for window in windows) != length:
        return False
    if len(windows) == 1:
        return True
    seen = torch.zeros(length, dtype=torch.bool)
    for window in windows:
        window.view(seen).fill_(True)
    return bool(seen.all())
