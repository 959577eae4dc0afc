"""What must hold between keys. Each rule yields messages: where, what is wrong, what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from omni_ds.config.optimizer import optimizer_faults
from omni_ds.config.scheduler import scheduler_faults

if TYPE_CHECKING:
    from omni_ds.config.parts import EncoderConfig, PartConfig
    from omni_ds.config.root import Config

_REDUCES = {"pixel_shuffle": "image", "frame_stack": "audio"}
_ON_GPU = ("fusedadam", "lamb", "fusedlamb", "lion")  # DeepSpeed's kernels
_PROCESSOR_KEYS = {
    "max_seconds": "audio",
    "pad_to_window": "audio",
    "sampling_rate": "audio",
    "min_pixels": "image",
    "max_pixels": "image",
    "fps": "image",
    "min_frames": "image",
    "max_frames": "image",
    "video_min_pixels": "image",
    "video_max_pixels": "image",
    "video_total_pixels": "image",
}


def broken_rules(config: Config) -> list[str]:
    """Messages of all rules that the (well-typed) configuration breaks; empty when it is fine."""
    return [message for rule in _RULES for message in rule(config)]


def _model_or_parts(config: Config) -> Iterator[str]:
    omni = config.omni
    parts: dict[str, PartConfig] = {"omni.llm": omni.llm}
    parts |= {f"omni.encoders.{name}": encoder for name, encoder in omni.encoders.items()}
    for key, part in parts.items():
        if omni.model is not None:
            for given in ("path", "config"):
                if getattr(part, given) is not None:
                    yield (
                        f"{key}.{given}: omni.model.path already says where the weights are; remove one of "
                        "both"
                    )
        elif part.path is None and part.config is None:
            yield f"{key}: give path (an HF checkpoint) or config (an inline HF configuration, fresh weights)"
        elif part.path is not None and part.config is not None:
            yield f"{key}: path and config exclude each other; remove one"
        if part.config is not None and not isinstance(part.config.get("model_type"), str):
            yield (
                f'{key}.config.model_type: missing; give the HF name of the architecture, for example "qwen3"'
            )


def _first_stage(config: Config) -> Iterator[str]:
    parallel = config.omni.encoder_parallel
    if parallel.first_stage_cut == "with_encoders" and parallel.placement != "first_stage":
        yield (
            'omni.encoder_parallel.first_stage_cut: "with_encoders" needs placement "first_stage"; encoders '
            'on every rank leave the stages even: use "even"'
        )


def _tokenizer(config: Config) -> Iterator[str]:
    llm = config.omni.llm
    if llm.path is None and llm.config is not None and llm.tokenizer is None:
        yield "omni.llm.tokenizer: missing; fresh weights have none, give the folder or hub name of one"


def _encoders(config: Config) -> Iterator[str]:
    for name, encoder in config.omni.encoders.items():
        key = f"omni.encoders.{name}"
        if name == "llm" or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"{key}: an encoder's name is letters, digits and _, and not llm; rename it"
        if encoder.projector.type != "mlp" and config.omni.model is None:
            yield f'{key}.projector.type: "{encoder.projector.type}" needs such an omni.model; use "mlp"'
        if encoder.modality is None:
            if config.omni.model is None:
                yield f"{key}.modality: missing; give image or audio"
        else:
            yield from _fits_modality(key, encoder)


def _fits_modality(key: str, encoder: EncoderConfig) -> Iterator[str]:
    projector, modality = encoder.projector, encoder.modality
    needs = _REDUCES.get(projector.reduction, modality)
    if needs != modality and (needs, modality) != ("image", "video"):
        yield (
            f"{key}.projector.reduction: {projector.reduction} is for {needs} encoders and this one is for "
            f"{modality}; use {'frame_stack' if modality == 'audio' else 'pixel_shuffle'} or none"
        )
    if projector.reduction == "none" and projector.type == "mlp" and projector.factor != 1:
        yield (
            f"{key}.projector.factor: {projector.factor} has no effect with reduction none; "
            "set projector.reduction to pixel_shuffle or frame_stack"
        )
    processor = encoder.processor
    for option, belongs in _PROCESSOR_KEYS.items():
        default = type(processor).model_fields[option].default
        if getattr(processor, option) != default and belongs != modality and modality != "video":
            yield (
                f"{key}.processor.{option}: is for {belongs} encoders, this one is for {modality}; remove it"
            )
    if modality == "audio":
        for option in ("feature_layer", "feature_select"):
            if getattr(encoder, option) is not None:
                yield f"{key}.{option}: is for image encoders, this one is for audio; remove it"
    low, high = processor.min_pixels, processor.max_pixels
    if low is not None and high is not None and low > high:
        yield f"{key}.processor.min_pixels: {low} is more than max_pixels {high}; exchange them"
    low, high = processor.video_min_pixels, processor.video_max_pixels
    if low is not None and high is not None and low > high:
        yield f"{key}.processor.video_min_pixels: {low} is more than video_max_pixels {high}; exchange them"
    low, high = processor.min_frames, processor.max_frames
    if low is not None and high is not None and low > high:
        yield f"{key}.processor.min_frames: {low} is more than max_frames {high}; exchange them"


def _placeholders(config: Config) -> Iterator[str]:
    seen: dict[str, str] = {}
    for name, encoder in config.omni.encoders.items():
        token = encoder.placeholder or (f"<{encoder.modality}>" if encoder.modality else None)
        if token is None:
            continue
        if token in seen and encoder.placeholder is not None:
            yield (
                f"omni.encoders.{name}.placeholder: {token} already stands for the features of "
                f"{seen[token]}; choose another token"
            )
        seen[token] = name


def _something_trains(config: Config) -> Iterator[str]:
    omni = config.omni
    frozen = [omni.llm.freeze]
    for encoder in omni.encoders.values():
        frozen += [encoder.freeze, encoder.projector.freeze]
    if omni.model is not None and not omni.encoders:
        return  # it has parts that are not known yet
    if all(frozen):
        yield (
            "omni: every part is frozen, so there is nothing to learn; set freeze to false in omni.llm, an "
            "encoder or its projector"
        )


def _duration(config: Config) -> Iterator[str]:
    train = config.omni.train
    if train.max_steps is not None and train.num_train_epochs is not None:
        yield "omni.train: max_steps and num_train_epochs exclude each other; remove one"
    if train.max_steps is None and train.num_train_epochs is None:
        yield "omni.train: give max_steps or num_train_epochs"


def _budget(config: Config) -> Iterator[str]:
    data = config.omni.data
    if data.max_tokens_per_micro_batch < data.max_length:
        yield (
            f"omni.data.max_tokens_per_micro_batch: {data.max_tokens_per_micro_batch} is less than "
            f"omni.data.max_length {data.max_length}, so the longest sample would not fit; raise it to at "
            f"least {data.max_length}, or lower max_length"
        )


def _evaluation(config: Config) -> Iterator[str]:
    for name, source in config.omni.eval.sets.items():
        key = f"omni.eval.sets.{name}"
        if source.weight != 1.0:
            yield f"{key}.weight: each sample of an evaluation set is used once; remove it"
        if "/" in name or name.startswith("."):
            yield f"{key}: the name of a set becomes part of metric names; leave out / and a leading dot"


def _precision(config: Config) -> Iterator[str]:
    if config.fp16.enabled is True:
        yield (
            "fp16.enabled: float16 is refused, because its loss scaling cannot be shared by the LLM's and "
            'the encoders\' engine; use "bf16": {"enabled": true}, or neither for float32'
        )
    if config.data_types.grad_accum_dtype == "bf16" and config.bf16.enabled is False:
        yield "data_types.grad_accum_dtype: bf16 needs bf16.enabled; remove it, or enable bf16"


def _zero(config: Config) -> Iterator[str]:
    stage, stages = config.zero_optimization.stage, config.pipeline.stages
    if stage == 0 and config.bf16.enabled is not False and not config.omni.llm.freeze:
        yield (
            "zero_optimization.stage: 0 has no float32 weights beside those in bf16; use 1 (the same result "
            "with less memory), or set bf16.enabled to false"
        )
    if stage >= 2 and stages != "auto" and stages > 1:
        yield (
            f"zero_optimization.stage: {stage} shards gradients{' and weights' if stage == 3 else ''}, "
            f"which a pipeline of {stages} stages needs whole until its last micro-batch; set "
            f"zero_optimization.stage to 1, or pipeline.stages to 1 (omni.encoder_parallel.zero_stage may "
            f"be 1, 2 or 3 in any case)"
        )


def _offload(config: Config) -> Iterator[str]:
    zero, kind = config.zero_optimization, config.optimizer.type
    found = {"offload_optimizer": zero.offload_optimizer, "offload_param": zero.offload_param}
    devices = {key: "none" if section is None else section.device for key, section in found.items()}
    for key, device in devices.items():
        if device == "nvme":
            yield f'zero_optimization.{key}.device: nvme is not supported; use "cpu"'
    if set(devices.values()) == {"none"}:
        return
    if config.omni.llm.freeze:
        yield (
            "zero_optimization: a frozen LLM has no optimizer state, and its weights stay on the GPU; remove "
            "offload_optimizer and offload_param, and use more pipeline.stages if it does not fit"
        )
    elif zero.stage == 0:
        yield (
            "zero_optimization.offload_optimizer: stage 0 updates the weights where they are; use stage 1, 2 "
            "or 3"
        )
    elif devices["offload_param"] != "none" and zero.stage != 3:
        yield (
            f"zero_optimization.offload_param: stage {zero.stage} keeps the weights whole on the GPU; use "
            f"stage 3 with pipeline.stages 1, or remove it (offload_optimizer works with stage {zero.stage})"
        )
    elif devices["offload_param"] != "none" and devices["offload_optimizer"] == "none":
        yield (
            'zero_optimization.offload_param: needs offload_optimizer as well; set it to {"device": "cpu"}, '
            "or remove offload_param"
        )
    if kind.lower() in _ON_GPU:
        yield (
            f"optimizer.type: {kind} updates on the GPU and zero_optimization.offload_optimizer in host "
            "memory; use AdamW or CPUAdam"
        )


def _optimizer(config: Config) -> Iterator[str]:
    yield from optimizer_faults(config.optimizer)


def _scheduler(config: Config) -> Iterator[str]:
    if config.scheduler is not None:
        yield from scheduler_faults(config.scheduler)


_RULES = (
    _model_or_parts,
    _first_stage,
    _tokenizer,
    _encoders,
    _placeholders,
    _something_trains,
    _duration,
    _budget,
    _evaluation,
    _precision,
    _zero,
    _offload,
    _optimizer,
    _scheduler,
)
