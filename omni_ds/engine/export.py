"""Write the trained model as an HF folder, each rank its own share."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.originals import Originals
from omni_ds.checkpoint.copies import in_first_shards
from omni_ds.checkpoint.export import ExportParts, ShardWriter, check_export_target, finish_export
from omni_ds.checkpoint.export_model import finish_model_export, write_unused
from omni_ds.checkpoint.export_shards import Manifest
from omni_ds.checkpoint.full_weights import full_parameters
from omni_ds.composition import Composition
from omni_ds.config import Config
from omni_ds.engine.runtime import Runtime
from omni_ds.engine.summary import encoder_names
from omni_ds.errors import UserError
from omni_ds.parallel.agreement import all_or_error, broadcast_from_rank_0


def check_target(out_dir: str, runtime_group: dist.ProcessGroup) -> None:
    """Fail before training, not after it, when the folder cannot be written; collective."""
    broadcast_from_rank_0(lambda: check_export_target(out_dir), runtime_group)


def export_model(out_dir: str, config: Config, composition: Composition, runtime: Runtime) -> Path:
    """Export to ``out_dir``; collective over the world.

    The parameters of a stage are written by its first rank, which gathers them from those that hold parts;
    the encoders' by rank 0.

    Raises:
        UserError: the folder cannot be written; on every rank.
    """
    group, model = runtime.groups.control, composition.model
    writer = all_or_error(
        lambda: ShardWriter(
            out_dir,
            f"rank{runtime.rank:05d}",
            config.omni.export.max_shard_size,
            _dtype_of(config, runtime, model),
        ),
        group,
    )
    stage = [h for h in runtime.module.held() if not getattr(h.parameter, "ds_pipe_replicated", False)]
    parameters = full_parameters(
        stage,
        runtime.groups.shards,
        originals=runtime.frozen_originals,
        wanted=in_first_shards(runtime.plan.mesh, runtime.rank),
    )
    tensors_of = _as_it_is if model is None else Originals(model)
    problem = _write(writer, parameters, tensors_of)
    with runtime.encoders.ranks.active():
        parameters = full_parameters(
            runtime.encoder_parameters(), originals=runtime.frozen_originals, wanted=runtime.rank == 0
        )
        problem = _write(writer, parameters, tensors_of) or problem
    if model is not None and runtime.rank == 0 and problem is None:
        try:
            write_unused(writer, model, encoder_names(runtime.encoders.encoders()))
        except UserError as error:
            problem = error

    def close() -> Manifest:
        if problem is not None:
            raise problem
        return writer.close()

    manifest = all_or_error(close, group)
    manifests: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(manifests, manifest, group=group)
    if model is not None:
        return broadcast_from_rank_0(
            lambda: finish_model_export(out_dir, manifests, model, config), runtime.groups.patient
        )
    return broadcast_from_rank_0(
        lambda: finish_export(out_dir, manifests, _parts(config, composition)), runtime.groups.patient
    )


def _as_it_is(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    return ((name, tensor),)


def _write(
    writer: ShardWriter,
    parameters: Iterator[tuple[str, Tensor]],
    tensors_of: Callable[[str, Tensor], Iterable[tuple[str, Tensor]]],
) -> UserError | None:
    """Go through ``parameters``, which is collective, to its end; returns what went wrong on the way.

    tensors_of: a parameter by its global name -> what to write, by name.
    """
    problem = None
    for name, tensor in parameters:
        if problem is None:
            try:
                for written, value in tensors_of(name, tensor):
                    writer.add(written, value)
            except UserError as error:
                problem = error
    return problem


def _dtype_of(config: Config, runtime: Runtime, model: Any) -> Callable[[str], torch.dtype]:
    if config.omni.export.dtype is not None:
        wanted = getattr(torch, config.omni.export.dtype)
        return lambda name: wanted
    if model is not None:
        return model.source.dtype
    return lambda name: runtime.source_dtypes.get(name, torch.float32)


def _parts(config: Config, composition: Composition) -> ExportParts:
    text = composition.text
    return ExportParts(
        config=config,
        llm_config=composition.llm_config,
        encoder_configs=composition.encoder_configs,
        tokenizer=text.tokenizer,
        processors=composition.media,
        chat_template=text.chat_template,
        placeholders={name: placeholder.id for name, placeholder in text.placeholders.items()},
    )
