"""Process groups of a mesh.

Groups are created once, in the same order on every rank, and handed on as arguments. Each kind of
point-to-point traffic and each direction has a group of its own: transfers of one pair of ranks on one
communicator run in order, so a feature waiting for its encoder would otherwise hold back activations.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from omni_ds.plan.mesh import Mesh


@dataclass(frozen=True)
class ProcessGroups:
    """Every process group the engine uses, as seen from this rank.

    Attributes:
        activations: world group of the messages stage i -> i + 1.
        gradients: world group of the messages stage i + 1 -> i.
        features: world group of the messages encoder rank -> stage.
        feature_gradients: world group of the messages stage -> encoder rank.
        control: world group on CPU (gloo), for agreement, metrics and checkpoints.
        world: default world group on the device, for collectives.
        stage: the ranks of this rank's pipeline stage.
        alone: this rank.
    """

    activations: ProcessGroup
    gradients: ProcessGroup
    features: ProcessGroup
    feature_gradients: ProcessGroup
    control: ProcessGroup
    world: ProcessGroup
    stage: ProcessGroup
    alone: ProcessGroup

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

        def mine(groups: Iterable[Sequence[int]]) -> ProcessGroup:
            """Create every group of a partition (all ranks must) and keep this rank's."""
            made = {tuple(group): dist.new_group(list(group), timeout=timeout) for group in groups}
            return next(group for members, group in made.items() if dist.get_rank() in members)

        stages: dict[int, list[int]] = {}
        for rank in ranks:
            stages.setdefault(mesh.coords(rank).pipe, []).append(rank)
        return cls(
            activations=new(),
            gradients=new(),
            features=new(),
            feature_gradients=new(),
            control=new("gloo"),
            world=dist.group.WORLD,
            stage=mine(stages.values()),
            alone=mine([rank] for rank in ranks),
        )
