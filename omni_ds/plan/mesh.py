"""The rank mesh: world = pipe x data x sequence x tensor, tensor innermost, pipe outermost.

Tensor ranks talk most and stand next to each other (NVLink); pipeline stages talk least. Sequence-parallel
ranks live in DeepSpeed's data axis: its index is data * sequence_degree + sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from omni_ds.errors import UserError

AXES = ("pipe", "data", "sequence", "tensor")


class Coords(NamedTuple):
    pipe: int
    data: int
    sequence: int
    tensor: int


@dataclass(frozen=True)
class Mesh:
    """Degrees of the four axes; a rank is their row-major index."""

    pipe: int
    data: int
    sequence: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise UserError(
                    f"mesh: degree of axis {axis} is {getattr(self, axis)}; it must be at least 1"
                )

    @classmethod
    def from_world(cls, world_size: int, pipe: int, sequence: int = 1, tensor: int = 1) -> Mesh:
        """The mesh whose data degree is what the other three leave of the world; UserError when they leave
        none."""
        used = pipe * sequence * tensor
        if used < 1 or world_size % used:
            raise UserError(
                f"mesh: pipe {pipe} x sequence {sequence} x tensor {tensor} = {used} does not divide "
                f"the {world_size} ranks of the world; choose degrees whose product does"
            )
        return cls(pipe=pipe, data=world_size // used, sequence=sequence, tensor=tensor)

    @property
    def shape(self) -> Coords:
        return Coords(self.pipe, self.data, self.sequence, self.tensor)

    @property
    def world_size(self) -> int:
        return self.pipe * self.data * self.sequence * self.tensor

    @property
    def data_degree(self) -> int:
        """D of the loss scale and of ZeRO: data x sequence."""
        return self.data * self.sequence

    @property
    def lanes(self) -> int:
        """Ranks of one stage of one DP replica; they stand at the same point of the schedule."""
        return self.sequence * self.tensor

    def rank(self, *, pipe: int = 0, data: int = 0, sequence: int = 0, tensor: int = 0) -> int:
        coords = Coords(pipe, data, sequence, tensor)
        for axis, index, degree in zip(AXES, coords, self.shape, strict=True):
            assert 0 <= index < degree, f"{axis} index {index} outside 0..{degree - 1}"
        return ((pipe * self.data + data) * self.sequence + sequence) * self.tensor + tensor

    def coords(self, rank: int) -> Coords:
        assert 0 <= rank < self.world_size, f"rank {rank} outside 0..{self.world_size - 1}"
        rest, tensor = divmod(rank, self.tensor)
        rest, sequence = divmod(rest, self.sequence)
        pipe, data = divmod(rest, self.data)
        return Coords(pipe, data, sequence, tensor)

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that differ in `axis` alone, each in the order of that axis."""
        if axis not in AXES:
            raise UserError(f"mesh: no axis {axis!r}; the axes are {', '.join(AXES)}")
        others = [range(getattr(self, other)) for other in AXES if other != axis]
        names = [other for other in AXES if other != axis]
        return tuple(
            tuple(
                self.rank(**dict(zip(names, index, strict=True)), **{axis: i})
                for i in range(getattr(self, axis))
            )
            for index in product(*others)
        )

    def zero_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups over which the LLM's gradients are reduced: data x sequence, one a (stage, tensor)."""
        return tuple(
            tuple(
                self.rank(pipe=p, data=d, sequence=s, tensor=t)
                for d in range(self.data)
                for s in range(self.sequence)
            )
            for p in range(self.pipe)
            for t in range(self.tensor)
        )

    def encoder_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each DP replica (by data index), stage by stage: they encode that replica's items."""
        return tuple(
            tuple(
                self.rank(pipe=p, data=d, sequence=s, tensor=t)
                for p in range(self.pipe)
                for s in range(self.sequence)
                for t in range(self.tensor)
            )
            for d in range(self.data)
        )
