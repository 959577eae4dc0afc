"""The whole LLM on one stage in a plain DeepSpeed engine, for ZeRO-2 and 3.

ZeRO-2 reduces gradients in every backward, into the shard of their owner; ZeRO-3 gathers weights in every
forward and backward too. So both need every replica to run every micro-batch, with at least one token.
"""

from collections.abc import Sequence

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups as deepspeed_groups
from torch import Tensor
from torch.distributed import ProcessGroup

from models.packed import PackedBatch
from omni_ds.engine.encoder_ranks import EncoderRanks
from omni_ds.engine.environment import TIMEOUT
from omni_ds.engine.llm_engine import backward_of
from omni_ds.engine.optimizer_adapter import OptimizerAdapter, adapt
from omni_ds.engine.plain_module import PlainModule
from omni_ds.engine.protocol import Handler
from omni_ds.parallel.groups import ProcessGroups
from omni_ds.plan.actions import Action, Kind
from omni_ds.plan.mesh import Mesh, group_of


class LaneRanks(EncoderRanks):
    """Who shares the LLM of one stage, for DeepSpeed: ``group`` the data and sequence ranks of this tensor
    lane, ``alone`` the tensor ranks of this replica."""

    @classmethod
    def create(cls, mesh: Mesh, groups: ProcessGroups, tensor: ProcessGroup | None) -> "LaneRanks":
        """Collective over the world. tensor: of LayerGroups."""
        if tensor is None:
            return cls(groups.stage, groups.alone)
        lane = group_of(dist.get_rank(), mesh.zero_groups())
        return cls(dist.new_group(lane, timeout=TIMEOUT, use_local_synchronization=True), tensor)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.alone)

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.alone)

    get_slice_parallel_group = EncoderRanks.get_model_parallel_group
    get_slice_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_model_parallel_world_size


class PlainEngine:
    """An :class:`~omni_ds.engine.protocol.LLMEngine` of one stage under ZeRO-2 or 3.

    Args:
        module: with its weights, under ZeRO-3 in shards already (:class:`~omni_ds.engine.sharding.Sharder`):
            DeepSpeed would hold them whole on the device first.
        optimizer: of its parameters.
        config: for DeepSpeed.
        ranks: that share the weights. As with a pipeline engine, DeepSpeed goes on seeing them outside of
            the encoders' calls.
    """

    trainable = True

    def __init__(self, module: PlainModule, optimizer: torch.optim.Optimizer, config: dict, ranks: LaneRanks):
        self.module, self._left = module, 0
        deepspeed_groups.mpu = ranks
        module.declare_weights()
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=config, mpu=ranks, dist_init_required=False
        )
        self.adapter: OptimizerAdapter = adapt(self.engine.optimizer)
        self.dtype = next(module.parameters()).dtype

    @property
    def optimizer(self) -> object:
        return self.engine.optimizer

    def run(self, actions: Sequence[Action], micro_batches: int, handler: Handler) -> None:
        self._left = sum(action.kind is Kind.B for action in actions)
        for action in actions:
            handler(action)

    def forward(self, batch: PackedBatch, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert batch.tokens, "every replica runs every micro-batch: an empty one must be padded"
        return self.engine(batch, hidden) if torch.is_grad_enabled() else self.module(batch, hidden)

    def backward(self, output: Tensor, gradient: Tensor | None, auxiliary: Tensor | None = None) -> None:
        self._left -= 1
        self.optimizer.clear_backward_seen_flag()
        self.engine.set_gradient_accumulation_boundary(not self._left)
        backward_of(output, gradient, auxiliary)

    def reduce_tied(self) -> None:
        pass  # both uses of a tied weight are in one backward

    def reduce(self) -> None:
        assert not self._left, "a micro-batch had no backward, and so no reduction"

    def squared_norm(self) -> Tensor:
        return self.adapter.squared_norm()

    def step(self, norm: float, clip: float) -> None:
        self.adapter.step(norm, clip)

    def skip_step(self) -> None:
        self.adapter.skip()

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)
