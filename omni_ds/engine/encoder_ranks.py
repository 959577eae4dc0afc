"""Which ranks share the encoders, in the form DeepSpeed asks for."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from deepspeed.utils import groups as deepspeed_groups
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class EncoderRanks:
    """The ranks that share the encoders, purely data parallel.

    Colocated encoders are shared by the world; ``group`` None lets DeepSpeed use its own world group. On the
    first stage only, they are shared by that stage's ranks: then this is the ``mpu`` DeepSpeed asks.
    """

    group: ProcessGroup | None = None
    alone: ProcessGroup | None = None

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make DeepSpeed see these ranks.

        ``deepspeed.utils.groups.mpu`` is process-global and the LLM's engine sets it; without this the
        encoder engine would reduce over the LLM's data axis, silently.
        """
        before = deepspeed_groups.mpu
        deepspeed_groups.mpu = self.mpu
        try:
            yield
        finally:
            deepspeed_groups.mpu = before

    @property
    def mpu(self) -> "EncoderRanks | None":
        return None if self.group is None else self

    # The names DeepSpeed calls on an mpu.
    def get_data_parallel_group(self) -> ProcessGroup:
        return self.group

    def get_data_parallel_world_size(self) -> int:
        return self.size

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.group)

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.group)

    def get_model_parallel_group(self) -> ProcessGroup:
        return self.alone

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0
