"""Process groups of a mesh.

Groups are created once, in the same order on every rank, and handed on as arguments. Each kind of
point-to-point traffic and each direction has a group of its own: transfers of one pair of ranks on one
communicator run in order, so a feature waiting for its encoder would otherwise hold back activations.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from omni_ds.plan.gangs import guests_of
from omni_ds.plan.mesh import Mesh, group_of


@dataclass(frozen=True)
class ProcessGroups:
    """Every process group the engine uses, as seen from this rank.

    Attributes:
        activations: world group of the messages stage i -> i + 1.
        gradients: world group of the messages stage i + 1 -> i.
        features: world group of the messages encoder rank -> stage.
        feature_gradients: world group of the messages stage -> encoder rank.
        control: world group on CPU (gloo), for agreement, metrics and checkpoints.
        patient: the same without a time limit worth the name, for waiting while rank 0 indexes or exports.
        world: default world group on the device, for collectives.
        stage: the ranks of this rank's pipeline stage.
        alone: this rank.
        shards: ranks that hold all parameters of this stage once (tensor x expert), on CPU (gloo).
    """

    activations: ProcessGroup
    gradients: ProcessGroup
    features: ProcessGroup
    feature_gradients: ProcessGroup
    control: ProcessGroup
    patient: ProcessGroup
    world: ProcessGroup
    stage: ProcessGroup
    alone: ProcessGroup
    shards: ProcessGroup

    @classmethod
    def create(cls, mesh: Mesh, timeout: timedelta) -> "ProcessGroups":
        """Create the groups; collective over the world.

        Raises:
            ValueError: the initialised world does not have the size of the mesh.
        """
        if dist.get_world_size() != mesh.world_size:
            raise ValueError(
                f"the mesh has {mesh.world_size} ranks but {dist.get_world_size()} processes were started"
            )
        ranks = list(range(mesh.world_size))

        def new(backend: str | None = None) -> ProcessGroup:
            return dist.new_group(ranks, timeout=timeout, backend=backend)

        def among(members: list[int], backend: str | None = None) -> ProcessGroup:
            """A group that its members alone create: other ranks do not wait for it."""
            return dist.new_group(members, timeout=timeout, backend=backend, use_local_synchronization=True)

        me = dist.get_rank()
        stage = mesh.coords(me).pipe
        groups = cls(
            activations=new(),
            gradients=new(),
            features=new(),
            feature_gradients=new(),
            control=new("gloo"),
            patient=dist.new_group(ranks, timeout=timedelta(days=7), backend="gloo"),
            world=dist.group.WORLD,
            stage=among([rank for rank in ranks if mesh.coords(rank).pipe == stage]),
            alone=among([me]),
            shards=among(group_of(me, mesh.shard_groups()), "gloo"),
        )
        groups._connect(mesh)
        return groups

    def _connect(self, mesh: Mesh) -> None:
        """Open the connection of every pair that will exchange messages, in one order in the whole world.

        NCCL makes a pair's communicator at its first message and blocks both hosts until the other is there:
        in the middle of a schedule that can be a deadlock that no plan knows of.
        """
        me = dist.get_rank()
        replica = mesh.encoder_groups()[mesh.coords(me).data]
        lanes = len(replica) // mesh.pipe
        neighbours = [(a, b) for a, b in zip(replica, replica[lanes:], strict=False)]
        to_first = [(a, b) for a in replica[:lanes] for b in replica if a != b]
        for group, pairs in (
            (self.activations, neighbours),
            (self.gradients, neighbours),
            (self.features, to_first),
            (self.feature_gradients, to_first),
        ):
            for a, b in sorted({(min(pair), max(pair)) for pair in pairs}):
                if me in (a, b):
                    _greet(b if me == a else a, group)

    def connect_guests(self, mesh: Mesh, largest: int, replicas: int) -> None:
        """The same for the ranks that may encode slices for other replicas (plan/gangs.py)."""
        me = dist.get_rank()
        pairs = {
            (min(first, guest), max(first, guest))
            for data, group in enumerate(mesh.encoder_groups())
            for guest in guests_of(mesh, largest, replicas, data)
            for first in group[: mesh.lanes]
        }
        for group in (self.features, self.feature_gradients):
            for a, b in sorted(pairs):
                if me in (a, b):
                    _greet(b if me == a else a, group)


def _greet(peer: int, group: ProcessGroup) -> None:
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    first = torch.zeros(1, device=device)
    if dist.get_rank() < peer:
        dist.send(first, peer, group=group)
        dist.recv(first, peer, group=group)
    else:
        dist.recv(first, peer, group=group)
        dist.send(first, peer, group=group)
