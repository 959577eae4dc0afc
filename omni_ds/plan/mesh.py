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
    """Degrees of the four axes; a rank is their row-major index.

    expert: neighbours in a ZeRO group (data x sequence) that hold different experts.
    """

    pipe: int
    data: int
    sequence: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise UserError(
                    f"mesh: degree of axis {axis} is {getattr(self, axis)}; it must be at least 1"
                )

        if self.expert < 1 or self.data_degree % self.expert:
            raise UserError(
                f"mesh: {self.expert} expert-parallel ranks do not divide data {self.data} x sequence "
                f"{self.sequence} = {self.data_degree}; choose a degree that does"
            )

    @classmethod
    def from_world(
        cls, world_size: int, pipe: int, sequence: int = 1, tensor: int = 1, expert: int = 1
    ) -> Mesh:
        """The mesh whose data degree is what the other three leave of the world; UserError when they leave
        none."""
        used = pipe * sequence * tensor
        if used < 1 or world_size % used:
            raise UserError(
                f"mesh: pipe {pipe} x sequence {sequence} x tensor {tensor} = {used} does not divide "
                f"the {world_size} ranks of the world; choose degrees whose product does"
            )
        return cls(pipe, world_size // used, sequence, tensor, expert)

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

    def expert_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that share out the experts of a layer, inside one (stage, tensor)."""
        return tuple(
            group[start : start + self.expert]
            for group in self.zero_groups()
            for start in range(0, len(group), self.expert)
        )

    def expert_data_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that hold the same experts."""
        return tuple(group[i :: self.expert] for group in self.zero_groups() for i in range(self.expert))

    def shard_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks of a stage that hold all of its parameters once: one expert group by the tensor
        axis."""
        blocks = self.data_degree // self.expert
        return tuple(
            tuple(
                rank
                for e in range(self.expert)
                for t in range(self.tensor)
                for rank in [((p * self.data_degree) + block * self.expert + e) * self.tensor + t]
            )
            for p in range(self.pipe)
            for block in range(blocks)
        )

    def kv_groups(self, kv_heads: int) -> tuple[tuple[int, ...], ...]:
        """Groups of tensor ranks that hold copies of one key-value head: where there are fewer heads than
        ranks, tensor rank t serves head t * kv_heads // tensor."""
        return tuple(
            tuple(rank for t, rank in enumerate(group) if t * kv_heads // self.tensor == head)
            for group in self.groups("tensor")
            for head in range(kv_heads)
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


def group_of(rank: int, groups: tuple[tuple[int, ...], ...]) -> list[int]:
    """The one of disjoint groups that holds `rank`."""
    return next(list(group) for group in groups if rank in group)
