"""The LLM's stage on a DeepSpeed pipeline engine, and the same protocol for a frozen LLM.

DeepSpeed's ``train_batch`` does, beside running its schedule: scaling the loss by the number of
micro-batches, clearing low-precision and updating high-precision gradients around each backward (bf16),
tied-weight reduction, boundary flags, the loss broadcast. All of it is done here or in the executor, for
the planned actions. Losses reach us already scaled, so autograd is called directly and no hook divides.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from models.packed import PackedBatch
from omni_ds.engine.instructions import INSTRUCTIONS, PlannedSchedule
from omni_ds.engine.optimizer_adapter import OptimizerAdapter, adapt
from omni_ds.engine.pipeline_module import OmniPipelineModule
from omni_ds.engine.protocol import Handler
from omni_ds.plan.actions import Action


def backward_of(output: Tensor, gradient: Tensor | None, auxiliary: Tensor | None = None) -> None:
    """Backward of a stage's output and of its router losses; nothing where nothing has a graph (a frozen LLM
    without media in the micro-batch)."""
    found = [(output, gradient), (auxiliary, None)]
    found = [(tensor, given) for tensor, given in found if tensor is not None and tensor.requires_grad]
    if found:
        torch.autograd.backward([tensor for tensor, _ in found], [given for _, given in found])


class OmniPipelineEngine(PipelineEngine):
    """A :class:`PipelineEngine` that runs planned actions; its instruction map is entirely ours."""

    def __init__(self, module: OmniPipelineModule, optimizer: torch.optim.Optimizer, config: dict):
        super().__init__(
            args=None,
            model=module,
            optimizer=optimizer,
            model_parameters=None,
            training_data=None,
            lr_scheduler=None,
            mpu=module.mpu(),
            dist_init_required=False,
            collate_fn=None,
            config=config,
            config_class=DeepSpeedConfig(config, module.mpu()),
        )
        self._handler: Handler | None = None
        self.adapter: OptimizerAdapter = adapt(self.optimizer, module.mpu())
        self.dtype = next(module.parameters()).dtype

    @property
    def trainable(self) -> bool:
        return True

    def run(self, actions: Sequence[Action], micro_batches: int, handler: Handler) -> None:
        """Run ``actions`` in order through DeepSpeed's schedule interface; ``handler`` executes each."""
        self._handler = handler
        self._exec_schedule(PlannedSchedule(actions, micro_batches, self.num_stages, self.stage_id))

    def _run_action(self, action: Action) -> None:
        self._handler(action)

    _INSTRUCTION_MAP = dict.fromkeys(INSTRUCTIONS.values(), _run_action)

    def forward(self, batch: PackedBatch, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.module(batch, hidden)

    def backward(self, output: Tensor, gradient: Tensor | None, auxiliary: Tensor | None = None) -> None:
        if isinstance(self.optimizer, BF16_Optimizer):
            self.optimizer.clear_lp_grads()
            backward_of(output, gradient, auxiliary)
            self.optimizer.update_hp_grads(clear_lp_grads=False)
        else:
            backward_of(output, gradient, auxiliary)

    def reduce_tied(self) -> None:
        self._fill_missing_gradients()
        # DeepSpeed's own looks for gradients in two of the places only where its optimizers keep them.
        for weight, group in self.module.get_tied_weights_and_groups():
            dist.all_reduce(self.adapter.gradient(weight), group=group)

    def reduce(self) -> None:
        self._fill_missing_gradients()
        alone = self.mpu.get_data_parallel_world_size() == 1
        # In bf16, DeepSpeed rounds sums for sending, even to nobody; other optimizers get ready for a step.
        if not (alone and isinstance(self.optimizer, BF16_Optimizer)):
            self._exec_reduce_grads()

    def _fill_missing_gradients(self) -> None:
        """A replica may have had only empty micro-batches."""
        self.adapter.fill_missing(p for p in self.module.parameters() if p.requires_grad)

    def squared_norm(self) -> Tensor:
        return self.adapter.squared_norm()

    def step(self, norm: float, clip: float) -> None:
        self.adapter.step(norm, clip)

    def skip_step(self) -> None:
        self.adapter.skip()


class FrozenPipeline:
    """The stages of a fully frozen LLM: nothing to optimise, gradients only pass through.

    DeepSpeed's pipeline engine wants a trainable parameter on every stage; this runs the same module and
    the same actions without one.
    """

    trainable = False

    def __init__(self, module: OmniPipelineModule):
        self.module = module
        self.num_stages = module.num_stages
        self.stage_id = module.stage_id
        self.dtype = next(module.parameters()).dtype

    def run(self, actions: Sequence[Action], micro_batches: int, handler: Handler) -> None:
        for instructions in PlannedSchedule(actions, micro_batches, self.num_stages, self.stage_id).steps():
            for instruction in instructions:
                handler(instruction.action)

    def forward(self, batch: PackedBatch, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.module(batch, hidden)

    def backward(self, output: Tensor, gradient: Tensor | None, auxiliary: Tensor | None = None) -> None:
        backward_of(output, gradient, auxiliary)

    def reduce_tied(self) -> None:
        pass

    def reduce(self) -> None:
        pass

    def squared_norm(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64)

    def step(self, norm: float, clip: float) -> None:
        pass

    def skip_step(self) -> None:
        pass

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)


def sum_over_ranks(values: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    """Sum of float64 values over the CPU ``group``."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return total.tolist()
