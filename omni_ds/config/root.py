"""The whole configuration: DeepSpeed's keys at the top level and the section `omni`."""

from typing import Any, Self

from pydantic import model_validator

from omni_ds.config.base import Auto, NonNegativeFloat, PositiveInt
from omni_ds.config.deepspeed import (
    BF16,
    FP16,
    ActivationCheckpointing,
    CSVMonitor,
    DataTypes,
    ExpertParallel,
    Optimizer,
    PassedOn,
    Pipeline,
    Scheduler,
    TensorBoard,
    TensorParallel,
    WandB,
    Zero,
)
from omni_ds.config.omni import OmniConfig
from omni_ds.config.rules import broken_rules


class Config(PassedOn):
    """DeepSpeed's keys keep their names and meaning; everything else is in `omni`."""

    train_batch_size: PositiveInt
    """Samples of one optimizer step, over all ranks. Packing decides the number of micro-batches."""
    train_micro_batch_size_per_gpu: Auto = "auto"
    """Only auto: samples are packed by tokens (`omni.data.max_tokens_per_micro_batch`)."""
    gradient_accumulation_steps: Auto | PositiveInt | None = None
    """Number of micro-batches of each replica in a step; null or auto: the fewest that fit the token budget
    and fill the pipeline."""
    gradient_clipping: Auto | NonNegativeFloat = 1.0
    """Largest norm of the gradient over all parts; 0: no clipping; auto: 1."""
    bf16: BF16 = BF16()
    """Train in bfloat16 with float32 master weights."""
    fp16: FP16 = FP16()
    """Refused when enabled."""
    data_types: DataTypes = DataTypes()
    """Types of numbers."""
    optimizer: Optimizer = Optimizer()
    """The optimizer."""
    scheduler: Scheduler | None = None
    """The schedule of the learning rate; null: constant."""
    zero_optimization: Zero = Zero()
    """ZeRO of the LLM."""
    pipeline: Pipeline = Pipeline()
    """The LLM's pipeline."""
    activation_checkpointing: ActivationCheckpointing | None = None
    """Present: recompute activations in the backward pass."""
    tensor_parallel: TensorParallel = TensorParallel()
    """Tensor parallelism of the LLM."""
    sequence_parallel_size: Auto | PositiveInt = 1
    """Ranks that share each packed sequence (Ulysses); auto: chosen to fit."""
    expert_parallel: ExpertParallel = ExpertParallel()
    """Expert parallelism of the LLM."""
    tensorboard: TensorBoard = TensorBoard()
    """Metrics for TensorBoard."""
    csv_monitor: CSVMonitor = CSVMonitor()
    """Metrics as CSV files."""
    wandb: WandB = WandB()
    """Metrics for Weights & Biases."""
    steps_per_print: PositiveInt = 1
    """Print the metrics every so many steps."""
    omni: OmniConfig
    """What is trained, on what, and what comes out."""

    @model_validator(mode="after")
    def _obey_rules(self) -> Self:
        broken = broken_rules(self)
        if broken:
            raise ValueError("\n".join(broken))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; keys that are null are left out, so that it loads again to an equal Config."""
        return self.model_dump(mode="json", exclude_none=True)
