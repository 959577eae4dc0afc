"""Which part of a whole parameter a rank holds.

Every parameter is looked at as a matrix [shape[0], product of the other dimensions]. Column-parallel
weights, vocabularies and experts are ranges of rows; row-parallel weights and the halves of a fused
projection are ranges of columns. A region is a rectangle of that matrix, so that any two regions of one
parameter, whatever layouts they come from, meet in a rectangle again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Region:
    """rows [r0, r1) and columns [c0, c1) of the matrix view of a parameter of `shape`."""

    shape: tuple[int, ...]
    rows: tuple[int, int]
    columns: tuple[int, int]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        return cls(tuple(shape), (0, shape[0] if shape else 1), (0, prod(shape[1:])))

    @classmethod
    def of(cls, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Region:
        """[start, stop) of dimension 0 or 1, all of the others."""
        assert dim in (0, 1) and 0 <= start <= stop <= shape[dim]
        whole = cls.whole(shape)
        if dim == 0:
            return cls(whole.shape, (start, stop), whole.columns)
        inner = prod(shape[2:])
        return cls(whole.shape, whole.rows, (start * inner, stop * inner))

    def within(self, dim: int, start: int, stop: int) -> Region:
        """The part of this region that lies in [start, stop) of dimension `dim` of the whole parameter."""
        other = Region.of(self.shape, dim, start, stop)
        met = self.intersect(other)
        return met if met is not None else Region(self.shape, (0, 0), (0, 0))

    @property
    def is_whole(self) -> bool:
        return self == Region.whole(self.shape)

    @property
    def height(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]

    @property
    def elements(self) -> int:
        return self.height * self.width

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that holds this region."""
        if len(self.shape) < 2:
            return (self.height,) if self.shape else ()
        inner = prod(self.shape[2:])
        return (self.height, self.width // inner if inner else self.shape[1], *self.shape[2:])

    @property
    def index(self) -> tuple[slice, ...]:
        """Slices that cut this region out of the whole parameter."""
        if len(self.shape) < 2:
            return (slice(*self.rows),) if self.shape else ()
        inner = max(1, prod(self.shape[2:]))
        start, stop = self.columns
        assert start % inner == 0 and stop % inner == 0, "a region cuts dimensions 0 and 1 only"
        return (slice(*self.rows), slice(start // inner, stop // inner))

    def intersect(self, other: Region) -> Region | None:
        """What both hold, None when nothing."""
        assert self.shape == other.shape
        rows = (max(self.rows[0], other.rows[0]), min(self.rows[1], other.rows[1]))
        columns = (max(self.columns[0], other.columns[0]), min(self.columns[1], other.columns[1]))
        if rows[0] >= rows[1] or columns[0] >= columns[1]:
            return None
        return Region(self.shape, rows, columns)

    def runs(self, offset: int, length: int) -> Iterator[tuple[Region, int]]:
        """At most three rectangles that make up elements [offset, offset + length) of this region, flattened
        row by row, each with its distance from `offset`: a part of a row, whole rows, a part of a row."""
        assert offset >= 0 and offset + length <= self.elements
        done, width = 0, self.width
        while done < length:
            row, column = divmod(offset + done, width)
            if column or length - done < width:
                taken = min(width - column, length - done)
                rows, columns = (row, row + 1), (column, column + taken)
            else:
                count = (length - done) // width
                taken, rows, columns = count * width, (row, row + count), (0, width)
            yield (
                Region(
                    self.shape,
                    (self.rows[0] + rows[0], self.rows[0] + rows[1]),
                    (self.columns[0] + columns[0], self.columns[0] + columns[1]),
                ),
                done,
            )
            done += taken
