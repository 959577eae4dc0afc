"""What a config composes: HF configs, numbers for the plan, processors. Nothing is allocated."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from omni_ds.config import Config
from omni_ds.config.load import validate
from omni_ds.errors import UserError
from omni_ds.plan.build import Plan, PlanOptions, build_plan
from omni_ds.plan.cost import encoder_work_per_token
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.llm_meta import LLMMeta
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.sample import SampleMeta


@dataclass
class Composition:
    """The parts of a model, read but not built.

    Attributes:
        llm_config: HF config of the LLM; its ``vocab_size`` covers added placeholder tokens.
        embedding_rows: of the LLM before tokens were added.
        encoder_configs: HF config of each tower.
        llm, encoders: the same in numbers.
        model: the checkpoint that all parts are from, with ``omni.model``.
        text: tokenizer, chat template and placeholders; None when only numbers were asked for.
        media: preprocessing by encoder; empty with ``text`` None.
    """

    llm_config: Any
    embedding_rows: int
    encoder_configs: dict[str, Any]
    llm: LLMMeta
    encoders: tuple[EncoderMeta, ...]
    model: Any = None
    text: Any = None
    media: dict[str, Any] = field(default_factory=dict)


def complete(config: Config) -> Config:
    """The configuration with a section for every encoder that is found in ``omni.model``.

    Raises:
        UserError: the checkpoint is missing or not supported, or a section is for no part of it.
    """
    if config.omni.model is None:
        return config
    from models.multimodal import merged_section, read_model

    model = read_model(config.omni.model)
    values = config.to_dict()
    # what the user wrote: a default does not contradict the checkpoint
    given = {
        name: part.model_dump(mode="json", exclude_unset=True) for name, part in config.omni.encoders.items()
    }
    if unknown := sorted(given.keys() - model.sections.keys()):
        raise UserError(
            f"omni.encoders.{unknown[0]}: {model.path} has no part of this name; its encoders are "
            f"{', '.join(model.sections)}"
        )
    values["omni"]["encoders"] = {
        name: merged_section(name, given.get(name, {}), decided) for name, decided in model.sections.items()
    }
    return validate(values)


def read_composition(config: Config, *, processors: bool = True) -> Composition:
    """Read the parts named by ``config``, which is :func:`complete`.

    Args:
        processors: False leaves tokenizer and media processors out, for planning without data.

    Raises:
        UserError: a missing or unsupported checkpoint, or geometry that does not fit.
    """
    model, llm_config, encoder_configs = _read_parts(config)
    llm = LLMMeta.from_config(llm_config.to_dict(), trainable=not config.omni.llm.freeze)
    encoders = tuple(
        EncoderMeta.from_config(name, config.omni.encoders[name], hf.to_dict(), llm_config.hidden_size)
        for name, hf in encoder_configs.items()
    )
    if config.omni.data.use_audio_in_video and getattr(model, "clock", None) is None:
        raise UserError(
            "omni.data.use_audio_in_video: this model does not hear the sound of videos; remove the key"
        )
    text, media, embedding_rows = None, {}, llm_config.vocab_size
    if processors:
        from data.processors import build_media, build_model_text, build_text

        if model is None:
            text = build_text(config)
            llm_config.vocab_size = max(llm_config.vocab_size, text.vocabulary_size)
            llm = replace(llm, vocab=llm_config.vocab_size)
        else:
            text = build_model_text(config, model, encoders)
            if text.vocabulary_size > llm_config.vocab_size:
                raise UserError(
                    f"omni.model.path: the tokenizer of {model.path} has ids up to "
                    f"{text.vocabulary_size - 1}, the embedding {llm_config.vocab_size} rows; they do not "
                    "belong together"
                )
        media = build_media(config, encoder_configs)
    return Composition(
        llm_config=llm_config,
        embedding_rows=embedding_rows,
        encoder_configs=encoder_configs,
        llm=llm,
        encoders=encoders,
        model=model,
        text=text,
        media=media,
    )


def _read_parts(config: Config) -> tuple[Any, Any, dict[str, Any]]:
    """(the checkpoint of ``omni.model`` or None, HF config of the LLM, of each tower)."""
    omni = config.omni
    if omni.model is not None:
        from models.multimodal import read_model

        model = read_model(omni.model)
        return model, copy.deepcopy(model.llm_config), {n: t.config for n, t in model.towers.items()}
    from models.hf_config import load_hf_config  # imports transformers

    return (
        None,
        load_hf_config(omni.llm, "llm", "omni.llm"),
        {
            name: load_hf_config(encoder, "encoder", f"omni.encoders.{name}")
            for name, encoder in omni.encoders.items()
        },
    )


def plan_of(
    config: Config, composition: Composition, world_size: int, samples: Sequence[SampleMeta] = ()
) -> Plan:
    """The static plan for a resolved configuration on ``world_size`` ranks.

    Args:
        samples: typical ones; what encoders do for them counts where layers are cut ``with_encoders``.

    Raises:
        UserError: degrees that do not divide, or that the LLM cannot be cut by.
    """
    options = plan_options(config, composition, samples)
    return build_plan(composition.llm, composition.encoders, mesh_of(config, world_size), options)


def plan_options(config: Config, composition: Composition, samples: Sequence[SampleMeta] = ()) -> PlanOptions:
    """What a configuration says about the plan beside its degrees; ``samples`` as in :func:`plan_of`."""
    work = 0
    if config.omni.encoder_parallel.first_stage_cut == "with_encoders":
        work = encoder_work_per_token(composition.encoders, samples, encoders_recompute(config))
    return PlanOptions(
        placement=config.omni.encoder_parallel.placement,
        encoder_zero_stage=config.omni.encoder_parallel.zero_stage,
        llm_zero_stage=0 if config.omni.llm.freeze else config.zero_optimization.stage,
        balance_mode=config.omni.balance.mode,
        long_short=config.omni.encoder_parallel.long_short,
        max_sp=config.omni.encoder_parallel.max_sp,
        group_size=None if config.omni.balance.group_size == "auto" else config.omni.balance.group_size,
        max_tokens_per_micro_batch=config.omni.data.max_tokens_per_micro_batch,
        micro_batches=config.gradient_accumulation_steps,
        recompute=recomputes(config),
        encoder_recompute=encoders_recompute(config),
        first_stage_work=work,
    )


def mesh_of(config: Config, world_size: int) -> Mesh:
    """The rank mesh of a resolved configuration; UserError for degrees that do not divide."""
    return Mesh.from_world(
        world_size,
        pipe=config.pipeline.stages,
        sequence=config.sequence_parallel_size,
        tensor=max(1, config.tensor_parallel.autotp_size),
        expert=config.expert_parallel.degree,
    )


def recomputes(config: Config) -> bool:
    """Whether the LLM's layers recompute their activations in the backward pass."""
    return config.activation_checkpointing is not None or config.pipeline.activation_checkpoint_interval > 0


def encoders_recompute(config: Config) -> bool:
    """Whether the encoders' do."""
    chosen = config.omni.encoder_parallel.recompute
    return recomputes(config) if chosen == "auto" else chosen
