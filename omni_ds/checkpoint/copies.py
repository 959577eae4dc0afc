"""Which rank writes a part of the LLM that several hold.

Parts are held more than once by tensor ranks (norms, the head of a key-value group), by stages (tied
weights: ``ds_pipe_replicated``), and by data ranks. ZeRO cuts a part among the data ranks that hold it, so
those write a fragment each; without ZeRO they hold equal copies.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from models.parameters import HeldParameter
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.region import Region

Part = tuple[str, Region]
"""Global name, and the region of that parameter."""


def in_first_shards(mesh: Mesh, rank: int) -> bool:
    """Whether ``rank`` belongs to the first of its stage's shard groups (``Mesh.shard_groups``)."""
    where = mesh.coords(rank)
    return (where.data * mesh.sequence + where.sequence) // mesh.expert == 0


def owned_parts(
    held: Sequence[HeldParameter], shards: ProcessGroup, mesh: Mesh, rank: int, *, sharded: bool
) -> frozenset[Part]:
    """Parts whose optimizer state this rank writes; collective over ``shards``.

    Args:
        held: parameters of this stage.
        shards: CPU group of the ranks that hold them once, in the order of ``Mesh.shard_groups``.
        sharded: whether ZeRO cuts the state among data ranks. Then the lowest tensor rank that holds a part
            owns it, together with its data ranks; else the first rank of the first shard group.
    """
    mine = [(h.name, h.region) for h in held]
    everyone: list = [None] * dist.get_world_size(shards)
    dist.all_gather_object(everyone, mine, group=shards)
    if not sharded and not in_first_shards(mesh, rank):
        return frozenset()
    position = dist.get_rank(shards)
    if sharded:
        tensor = position % mesh.tensor
        earlier = [parts for at, parts in enumerate(everyone) if at % mesh.tensor < tensor]
    else:
        earlier = everyone[:position]
    return frozenset(mine).difference(*earlier)
