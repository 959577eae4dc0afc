"""Builds this rank's modules and engines from the plan. Of the LLM only this stage is ever allocated."""

from dataclasses import dataclass, field

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.encoders import RuntimeEncoders, build_encoder
from models.freeze import set_trainable
from models.init import empty_parameters
from models.llm import build_llm_layers
from models.parameters import HeldParameter, held_parameters
from omni_ds.checkpoint.copies import Part, in_first_shards, owned_parts
from omni_ds.checkpoint.fragments import inner_optimizer, is_sharded
from omni_ds.checkpoint.state import EngineState
from omni_ds.composition import Composition, recomputes
from omni_ds.config import Config
from omni_ds.config.engines import encoder_engine_config, llm_engine_config
from omni_ds.engine.encoder_engine import EncoderEngine
from omni_ds.engine.encoder_ranks import EncoderRanks
from omni_ds.engine.environment import TIMEOUT
from omni_ds.engine.executor import StepExecutor
from omni_ds.engine.llm_engine import FrozenPipeline, OmniPipelineEngine, sum_over_ranks
from omni_ds.engine.loading import load_weights
from omni_ds.engine.optimizers import PartParameters, Schedules, build_optimizer, part_lr
from omni_ds.engine.pipeline_module import OmniPipelineModule
from omni_ds.engine.plain_engine import LaneRanks, PlainEngine
from omni_ds.engine.plain_module import PlainModule
from omni_ds.engine.protocol import LLMEngine
from omni_ds.engine.sharding import Sharder
from omni_ds.parallel.expert import register_expert_groups
from omni_ds.parallel.groups import ProcessGroups
from omni_ds.parallel.layer_groups import LayerGroups, create_gangs
from omni_ds.plan.build import Plan


@dataclass
class Runtime:
    """One rank's engines.

    Attributes:
        layer_groups: groups that the LLM's layers compute in.
        module: the LLM's stage; its ``encoder_anchor`` is ``encoders``.
        source_dtypes: dtype a parameter was imported with, by global name; absent for fresh weights.
        owned: parts of the LLM whose optimizer state this rank writes to checkpoints.
        frozen_originals: frozen weights as loaded, where training rounds them, on ranks that export.
    """

    plan: Plan
    rank: int
    device: torch.device
    groups: ProcessGroups
    layer_groups: LayerGroups
    module: OmniPipelineModule | PlainModule
    llm: LLMEngine
    encoders: EncoderEngine
    schedules: Schedules
    executor: StepExecutor
    source_dtypes: dict[str, torch.dtype]
    owned: frozenset[Part] = frozenset()
    frozen_originals: dict[Part, Tensor] = field(default_factory=dict)

    def learning_rates(self) -> dict[str, float]:
        return self.schedules.learning_rates()

    def expert_load(self) -> float:
        """Busiest expert of the last step over the mean; collective."""
        start, stop = self.plan.stages[self.plan.mesh.coords(self.rank).pipe]
        layers = sum(start <= index < stop for index in self.plan.llm.moe_layers)
        return self.module.expert_counts.load(
            (layers, self.plan.llm.experts), self.device, self.groups.stage, self.groups.control
        )

    def encoder_parameters(self) -> list[HeldParameter]:
        """Encoder parameters on this rank, whole, in config order."""
        return held_parameters(self.encoders.encoders().values())

    def engine_states(self) -> list[EngineState]:
        """What a checkpoint holds: each engine that trains something."""
        states = []
        if self.llm.trainable:
            refresh_llm = self.llm.adapter.refresh_weights
            states.append(EngineState("llm", self.llm.optimizer, self.module.held(), refresh_llm, self.owned))
        if self.encoders.engine is not None:

            def refresh() -> None:
                with self.encoders.ranks.active():
                    self.encoders.adapter.refresh_weights()

            states.append(
                EngineState("encoders", self.encoders.engine.optimizer, self.encoder_parameters(), refresh)
            )
        return states


def build_runtime(
    config: Config,
    composition: Composition,
    plan: Plan,
    groups: ProcessGroups,
    rank: int,
    device: torch.device,
) -> Runtime:
    """Allocate, load and wrap this rank's modules; collective over the world.

    Raises:
        UserError: weights are missing, unexpected or mis-shaped; on every rank.
    """
    dtype = torch.bfloat16 if config.bf16.enabled else torch.float32
    layer_groups = LayerGroups.create(plan.mesh, plan.llm.kv_heads, TIMEOUT)
    register_expert_groups(layer_groups)
    gangs = create_gangs(plan.mesh, plan.largest_gang, TIMEOUT) if plan.encoders else {}
    if plan.encoders and plan.largest_gang > 1:
        groups.connect_guests(plan.mesh, plan.largest_gang, plan.reorder_replicas)
    module = _llm_module(config, composition, plan, layer_groups)
    set_trainable(module, not config.omni.llm.freeze)
    with empty_parameters():
        encoders = {
            name: build_encoder(
                name,
                config.omni.encoders[name],
                hf_config,
                plan.llm.hidden,
                recompute=plan.options.encoder_recompute,
            )
            for name, hf_config in composition.encoder_configs.items()
        }
    ranks = sharder = None
    if isinstance(module, PlainModule):
        ranks = LaneRanks.create(plan.mesh, groups, layer_groups.tensor)
    if plan.options.llm_zero_stage == 3:
        engine_config = llm_engine_config(config, 1, plan.mesh.data_degree)
        sharder = Sharder(engine_config, ranks, layer_groups.expert_data, dtype, device)
    loaded = load_weights(config, composition, module, encoders, dtype, groups.control, sharder)
    module.mark_replicated()
    llm = _llm_engine(config, module, plan, ranks, dtype, device)
    encoder_engine = _encoder_engine(config, encoders, plan, groups, dtype, device)
    module.anchor_encoders(encoder_engine)
    engines = [e for e in (llm, encoder_engine.engine) if hasattr(e, "optimizer")]
    schedules = Schedules(config, [inner_optimizer(engine.optimizer) for engine in engines])
    executor = StepExecutor(
        plan,
        rank,
        llm,
        encoder_engine,
        groups,
        device,
        config.gradient_clipping,
        after_step=schedules.step,
        gangs=gangs,
    )
    runtime = Runtime(
        plan,
        rank,
        device,
        groups,
        layer_groups,
        module,
        llm,
        encoder_engine,
        schedules,
        executor,
        loaded.source_dtypes,
    )
    if llm.trainable:
        runtime.owned = owned_parts(
            module.held(), groups.shards, plan.mesh, rank, sharded=is_sharded(llm.optimizer)
        )
    loaded.restore_masters(runtime.engine_states())
    if in_first_shards(plan.mesh, rank):  # ranks that export; rank 0 alone exports encoders
        states = runtime.engine_states()
        trained = {h.name for state in states for h in state.held if h.parameter.requires_grad}
        runtime.frozen_originals = {
            (name, region): tensor
            for (name, region), tensor in loaded.originals.items()
            if name not in trained and (rank == 0 or name.startswith("llm."))
        }
    return runtime


def _llm_module(
    config: Config, composition: Composition, plan: Plan, groups: LayerGroups
) -> OmniPipelineModule | PlainModule:
    interval = config.pipeline.activation_checkpoint_interval
    recompute = recomputes(config) and interval <= 1
    layers = build_llm_layers(composition.llm_config, recompute=recompute, groups=groups, levels=plan.levels)
    if plan.options.llm_zero_stage >= 2:
        return PlainModule(layers, block=interval)
    return OmniPipelineModule(layers, plan, block=interval)


def _llm_engine(
    config: Config,
    module: OmniPipelineModule | PlainModule,
    plan: Plan,
    ranks: LaneRanks | None,
    dtype: torch.dtype,
    device: torch.device,
) -> LLMEngine:
    if config.omni.llm.freeze:
        return FrozenPipeline(module.to(device, dtype))
    if plan.options.llm_zero_stage < 3:  # else it is there, in shards
        module.to(device)
    lr = part_lr(config, config.omni.llm.lr)
    optimizer = build_optimizer(
        config, [PartParameters("llm", lr, tuple(h.parameter for h in module.held()))], device
    )
    if isinstance(module, PlainModule):
        return PlainEngine(module, optimizer, llm_engine_config(config, 1, plan.mesh.data_degree), ranks)
    return OmniPipelineEngine(module, optimizer, llm_engine_config(config, 1, plan.mesh.data_degree))


def _encoder_engine(
    config: Config,
    encoders: dict[str, nn.Module],
    plan: Plan,
    groups: ProcessGroups,
    dtype: torch.dtype,
    device: torch.device,
) -> EncoderEngine:
    width = plan.row_width
    first_stage = plan.first_stage_only
    ranks = EncoderRanks(groups.stage, groups.alone) if first_stage else EncoderRanks()
    zero_stage = config.omni.encoder_parallel.zero_stage
    trains = {name: any(p.requires_grad for p in encoder.parameters()) for name, encoder in encoders.items()}
    frozen = {name: encoder for name, encoder in encoders.items() if not trains[name]}
    trainable = {name: encoder for name, encoder in encoders.items() if trains[name]}
    frozen_module = RuntimeEncoders(frozen, width).to(device, dtype) if frozen else None
    trainable_module = RuntimeEncoders(trainable, width) if trainable else None
    engine = None
    if trainable_module is not None:
        trainable_module.to(device)
        parts = [part for name in trainable for part in _encoder_parts(config, name, trainable[name])]
        with ranks.active():
            engine, *_ = deepspeed.initialize(
                model=trainable_module,
                optimizer=build_optimizer(config, parts, device),
                config=_accumulating_in_fp32(encoder_engine_config(config), zero_stage),
                mpu=ranks.mpu,
                dist_init_required=False,
            )
    if first_stage and plan.mesh.coords(dist.get_rank()).pipe > 0:
        # DeepSpeed's start has barriers of the world, so all ranks took part; only the first stage encodes.
        trainable_module = frozen_module = engine = None
    return EncoderEngine(
        tuple(encoders),
        trainable_module,
        frozen_module,
        engine,
        width,
        zero_stage,
        dtype,
        device,
        ranks,
        share_norm=(lambda value: sum_over_ranks([value], groups.control)[0]) if first_stage else None,
    )


def _encoder_parts(config: Config, name: str, encoder: nn.Module) -> list[PartParameters]:
    section = config.omni.encoders[name]
    return [
        PartParameters(name, part_lr(config, section.lr), tuple(encoder.tower.parameters())),
        PartParameters(
            f"{name}.projector", part_lr(config, section.projector.lr), tuple(encoder.projector.parameters())
        ),
    ]


def _accumulating_in_fp32(engine_config: dict, zero_stage: int) -> dict:
    """bf16 with fp32 accumulation and ZeRO-2 becomes ZeRO-1.

    Gradients of all windows are reduced once, in ER, so nothing is left that stage 2 could shard earlier; and
    DeepSpeed accumulates in fp32 only in the optimizer of stage 1.
    """
    in_fp32 = engine_config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    if zero_stage == 2 and in_fp32 and engine_config.get("bf16", {}).get("enabled"):
        engine_config["zero_optimization"]["stage"] = 1
    return engine_config
