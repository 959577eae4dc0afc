"""The process groups that a layer of the LLM computes in."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from omni_ds.plan.mesh import Mesh, group_of
from omni_ds.plan.shards import even_bounds


@dataclass(frozen=True)
class LayerGroups:
    """Groups of this rank; None where the degree is 1.

    Attributes:
        tensor: ranks that hold slices of one layer.
        sequence: ranks that hold shards of one packed sequence.
        expert: ranks that hold different experts of one layer: neighbours in the data axis (data x sequence)
            of one stage and tensor index.
        expert_data: ranks that hold the same experts, over which their gradients are reduced.
        kv: ranks of the tensor group that hold copies of one key-value head; None where each has its own.
    """

    tensor: ProcessGroup | None = None
    sequence: ProcessGroup | None = None
    expert: ProcessGroup | None = None
    expert_data: ProcessGroup | None = None
    kv: ProcessGroup | None = None

    @classmethod
    def create(cls, mesh: Mesh, kv_heads: int, timeout: timedelta) -> "LayerGroups":
        """Create this rank's groups; collective over the world (each group is made by its members alone)."""
        me, found = dist.get_rank(), {}
        wanted = {
            "tensor": (mesh.tensor, mesh.groups("tensor")),
            "sequence": (mesh.sequence, mesh.groups("sequence")),
            "expert": (mesh.expert, mesh.expert_groups()),
            "expert_data": (mesh.expert, mesh.expert_data_groups()),
            "kv": (mesh.tensor if kv_heads < mesh.tensor else 1, mesh.kv_groups(kv_heads)),
        }
        for name, (size, groups) in wanted.items():
            if size > 1:
                found[name] = dist.new_group(
                    group_of(me, groups), timeout=timeout, use_local_synchronization=True
                )
        return cls(**found)


def degree(group: ProcessGroup | None) -> int:
    """Ranks of a group; 1 without one."""
    return 1 if group is None else dist.get_world_size(group)


def index(group: ProcessGroup | None) -> int:
    """This rank's place in a group; 0 without one."""
    return 0 if group is None else dist.get_rank(group)


def even_part(total: int, group: ProcessGroup | None) -> tuple[int, int]:
    """[start, stop) of this rank where ``total`` things are dealt over a group in order."""
    bounds, me = even_bounds(total, degree(group)), index(group)
    return bounds[me], bounds[me + 1]


ALONE = LayerGroups()


def create_gangs(mesh: Mesh, largest: int, timeout: timedelta) -> dict[int, ProcessGroup]:
    """Size (2, 4, ... ``largest``) -> this rank's aligned block of neighbours of its stage, which encode
    slices of long items together; no entry where it is in no whole block. Collective over the world."""
    me, width, gangs, size = dist.get_rank(), mesh.data * mesh.lanes, {}, 2
    while size <= largest:
        start = me % width // size * size
        if start + size <= width:
            first = me - me % width + start
            gangs[size] = dist.new_group(
                list(range(first, first + size)), timeout=timeout, use_local_synchronization=True
            )
            # NCCL connects a group in its first collective, which waits on the host for all of it: not in the
            # middle of a schedule.
            device = "cuda" if dist.get_backend(gangs[size]) == "nccl" else "cpu"
            dist.all_reduce(torch.zeros(1, device=device), group=gangs[size])
        size *= 2
    return gangs
