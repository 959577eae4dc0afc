"""Write the trained model as an HF folder, each rank its own share."""

from pathlib import Path

import torch
import torch.distributed as dist

from omni_ds.checkpoint.export import ExportParts, ShardWriter, check_export_target, finish_export
from omni_ds.checkpoint.full_weights import full_parameters
from omni_ds.composition import Composition
from omni_ds.config import Config
from omni_ds.engine.runtime import Runtime
from omni_ds.parallel.agreement import all_or_error, broadcast_from_rank_0


def check_target(out_dir: str, runtime_group: dist.ProcessGroup) -> None:
    """Fail before training, not after it, when the folder cannot be written; collective."""
    broadcast_from_rank_0(lambda: check_export_target(out_dir), runtime_group)


def export_model(out_dir: str, config: Config, composition: Composition, runtime: Runtime) -> Path:
    """Export to ``out_dir``; collective over the world.

    The stages' parameters are written by the first replica, the encoders' by rank 0.

    Raises:
        UserError: the folder cannot be written; on every rank.
    """
    group = runtime.groups.control
    where = runtime.plan.mesh.coords(runtime.rank)
    writes_stage = where.data == 0 and where.sequence == 0
    writer = all_or_error(
        lambda: ShardWriter(
            out_dir, f"rank{runtime.rank:05d}", config.omni.export.max_shard_size, _dtype_of(config, runtime)
        ),
        group,
    )
    stage = {
        name: parameter
        for name, parameter in runtime.module.global_names().items()
        if not getattr(parameter, "ds_pipe_replicated", False)
    }
    for name, tensor in full_parameters(stage):
        if writes_stage:
            writer.add(name, tensor)
    with runtime.encoders.ranks.active():
        for name, tensor in full_parameters(runtime.encoder_parameters()):
            if runtime.rank == 0:
                writer.add(name, tensor)
    manifest = all_or_error(writer.close, group)
    manifests: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(manifests, manifest, group=group)
    return broadcast_from_rank_0(
        lambda: finish_export(out_dir, manifests, _parts(config, composition)), group
    )


def _dtype_of(config: Config, runtime: Runtime):
    if config.omni.export.dtype is not None:
        wanted = getattr(torch, config.omni.export.dtype)
        return lambda name: wanted
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
