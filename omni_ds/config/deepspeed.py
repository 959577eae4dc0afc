"""DeepSpeed's own keys, under their own names: those read here, typed; those passed on; those refused."""

from typing import Any, Literal

from omni_ds.config.base import Auto, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class Optimizer(Section):
    """The optimizer; one for all parts, each with its own learning rate."""

    type: str = "AdamW"
    """AdamW, Adam or SGD (torch's; Adam means AdamW unless `adam_w_mode` is false, as in DeepSpeed), or
    one of DeepSpeed's: FusedAdam, CPUAdam, Lamb, Lion, Adagrad."""
    params: dict[str, Any] = {}
    """Arguments of the optimizer. `auto`: lr 1e-5, betas [0.9, 0.999], eps 1e-8, weight_decay 0."""


class Scheduler(Section):
    """The schedule of the learning rate. It scales each part's own learning rate."""

    type: Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"]
    """DeepSpeed's name of the schedule."""
    params: dict[str, Any] = {}
    """Arguments of the schedule. `auto`: total_num_steps is the length of the run, warmup_num_steps 3 % of
    it. Rates given here are those of a part that has the optimizer's lr; other parts scale with theirs."""


class BF16(Section):
    """Train in bfloat16 with float32 master weights."""

    enabled: bool | Auto = False
    """auto: on a GPU."""
    immediate_grad_update: bool | None = None
    """Add each gradient of the LLM to its float32 sum as soon as it is there; null: true. false: behind each
    backward pass, until when all of them are kept in bfloat16. Of ZeRO-1 with float32 sums; encoders always
    add at once."""
    check_grad_overflow: bool | None = None
    """Look for infinite or undefined gradients before a step."""


class FP16(Section):
    """Refused when enabled: float16 needs loss scaling, which two engines cannot share. Use bf16."""

    enabled: bool | Auto = False
    """Only false (auto counts as false)."""


class DataTypes(Section):
    """Types of numbers."""

    grad_accum_dtype: Literal["fp32", "bf16"] | None = None
    """In which gradients are accumulated; null: fp32."""


class Offload(Section):
    """Where the LLM's optimizer state, or its sharded weights, are kept. Encoders stay on the GPU."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """cpu: in the memory of the host. nvme is refused."""
    pin_memory: bool = False
    """Lock that memory, so that copies to and from the GPU are faster."""


class Zero(Section):
    """ZeRO of the LLM. The other keys but offloading hold for the encoders too (their stage:
    `omni.encoder_parallel`)."""

    stage: Literal[0, 1, 2, 3] = 1
    """Over the data-parallel ranks: 1 shards the optimizer state, 2 gradients too, 3 weights too; 0
    shards nothing. 2 and 3 need one pipeline stage, 0 needs float32."""
    contiguous_gradients: bool | None = None
    """Copy gradients to one buffer as they are made."""
    reduce_scatter: bool | None = None
    """Average gradients by reduce-scatter instead of all-reduce."""
    reduce_bucket_size: PositiveFloat | None = None
    """Elements reduced at once."""
    use_multi_rank_bucket_allreduce: bool | None = None
    """Reduce gradients of several owners together."""
    allgather_partitions: bool | None = None
    """Collect updated weights by all-gather instead of broadcasts."""
    allgather_bucket_size: PositiveFloat | None = None
    """Elements gathered at once."""
    overlap_comm: bool | None = None
    """Reduce gradients during the backward pass."""
    round_robin_gradients: bool | None = None
    """Deal gradients to ranks in turn (stages 1 and 2)."""
    sub_group_size: PositiveFloat | None = None
    """Elements updated at once (stage 3)."""
    stage3_prefetch_bucket_size: NonNegativeFloat | None = None
    """Elements fetched ahead (stage 3)."""
    stage3_param_persistence_threshold: NonNegativeFloat | None = None
    """Smaller weights stay whole on every rank (stage 3)."""
    stage3_max_live_parameters: NonNegativeFloat | None = None
    """Elements kept whole at once (stage 3)."""
    stage3_max_reuse_distance: NonNegativeFloat | None = None
    """Keep weights that are used again within so many elements (stage 3)."""
    offload_optimizer: Offload | None = None
    """Keep the LLM's optimizer state (stage 2 and 3: and gradients) in host memory and update it there;
    stages 1 to 3. AdamW, Adam and SGD run there as they are, CPUAdam is DeepSpeed's faster one."""
    offload_param: Offload | None = None
    """Keep the LLM's sharded weights in host memory; stage 3 with offload_optimizer."""


class Pipeline(Section):
    """The LLM's pipeline."""

    stages: Auto | PositiveInt = "auto"
    """Number of pipeline stages; auto: chosen to fit."""
    activation_checkpoint_interval: NonNegativeInt = 0
    """1: recompute activations of every layer, of LLM and encoders, in the backward pass; 0: keep them.
    k > 1: keep the input of every k-th layer of the LLM in a stage and recompute k layers at once; encoders
    as with 1."""


class ActivationCheckpointing(Section):
    """Present: as `pipeline.activation_checkpoint_interval` 1."""

    partition_activations: bool = False
    """Not supported yet."""
    cpu_checkpointing: bool = False
    """Not supported yet."""
    contiguous_memory_optimization: bool = False
    """Not supported yet."""
    number_checkpoints: PositiveInt | None = None
    """Not supported yet."""
    synchronize_checkpoint_boundary: bool = False
    """Not supported yet."""
    profile: bool = False
    """Not supported yet."""


class TensorParallel(Section):
    """Tensor parallelism of the LLM."""

    autotp_size: Auto | NonNegativeInt = 1
    """Neighbouring ranks that share each layer, with heads, MLP and vocabulary split; 0 and 1: none; auto:
    chosen to fit."""


class ExpertParallel(Section):
    """Expert parallelism of a mixture-of-experts LLM."""

    enabled: bool | None = None
    """false: autoep_size is ignored."""
    autoep_size: Auto | PositiveInt = 1
    """Ranks of the data (and sequence) axis that share the experts of each layer; auto: chosen to fit."""

    @property
    def degree(self) -> int:
        """Of a resolved configuration."""
        assert self.autoep_size != "auto", "resolve() comes first"
        return 1 if self.enabled is False else self.autoep_size


class TensorBoard(Section):
    """Metrics for TensorBoard."""

    enabled: bool = False
    """Write them."""
    output_path: str = ""
    """Folder; empty: in `omni.output_dir`."""
    job_name: str = "omni_ds"
    """Folder of this run in it."""


class CSVMonitor(Section):
    """Metrics as CSV files."""

    enabled: bool = False
    """Write them."""
    output_path: str = ""
    """Folder; empty: in `omni.output_dir`."""
    job_name: str = "omni_ds"
    """Folder of this run in it."""


class WandB(Section):
    """Metrics for Weights & Biases."""

    enabled: bool = False
    """Send them. Needs the package `wandb`."""
    project: str = "omni_ds"
    """Name of the project."""
    group: str | None = None
    """Name of the group."""
    team: str | None = None
    """Name of the team."""


class PassedOn(Section):
    """Keys that go to DeepSpeed as they are."""

    communication_data_type: Literal["fp32", "bf16"] | None = None
    """In which gradients are reduced; null: the training type."""
    prescale_gradients: bool | None = None
    """Divide gradients before they are reduced, not after."""
    gradient_predivide_factor: PositiveFloat | None = None
    """Divide by so much before the reduction and by the rest after it."""
    disable_allgather: bool | None = None
    """Collect updated weights without all-gather."""
    disable_python_gc: bool | None = None
    """Switch the garbage collector off in DeepSpeed's initialisation."""
    dump_state: bool | None = None
    """Print DeepSpeed's state after its initialisation."""
    memory_breakdown: bool | None = None
    """Print memory after parts of a step."""
    wall_clock_breakdown: bool | None = None
    """Print times of parts of a step."""
    comms_logger: dict[str, Any] | None = None
    """DeepSpeed's log of collectives."""
    log_level: str | None = None
    """Level of DeepSpeed's log: debug, info, warning, error, critical."""


# DeepSpeed's keys that would be silently without effect, or wrong, under two engines driven by a plan.
REFUSED = {
    "amp": 'apex mixed precision is not used here; set "bf16": {"enabled": true}',
    "torch_autocast": 'precision is bf16 with float32 master weights here; set "bf16": {"enabled": true}',
    "aio": "offloading to NVMe is not supported; remove it",
    "autotuning": "DeepSpeed's autotuner does not know this training loop; remove it",
    "checkpoint": "checkpoints have their own format here; see omni.checkpoint",
    "compile": "compiling the model is not supported; remove it",
    "compression_training": "compression is not supported; remove it",
    "curriculum_learning": "the order of the samples is the sampler's here; see omni.data.train[].weight",
    "data_efficiency": "the order of the samples is the sampler's here; see omni.data.train[].weight",
    "dataloader_drop_last": "a step always has train_batch_size samples; remove it",
    "eigenvalue": "it is not supported; remove it",
    "elasticity": "restart with --resume on another number of processes instead; remove it",
    "flops_profiler": "FLOPs come from the plan here; remove it",
    "gradient_allreduce_op": "gradients are sums over the target tokens of the global batch; remove it",
    "hybrid_engine": "it is not supported; remove it",
    "progressive_layer_drop": "it is not supported; remove it",
    "seq_parallel_communication_data_type": "sequence ranks exchange activations as they are; remove it",
    "sparse_attention": "it is not supported; remove it",
    "sparse_gradients": "it is not supported; remove it",
    "weight_quantization": "it is not supported; remove it",
    "zero_allow_untested_optimizer": "it is always on here; remove it",
    "zero_force_ds_cpu_optimizer": "it is always off here; remove it, and use optimizer.type CPUAdam",
    "comet": "use tensorboard, csv_monitor or wandb",
}
