"""The tables printed before training: what trains, how it is laid out, on which data."""

from collections.abc import Mapping

from torch import nn

from data.index import IndexedDataset
from models.attention import describe_backend
from models.liger import has_liger
from omni_ds.composition import Composition
from omni_ds.config import Config
from omni_ds.engine.optimizers import part_lr
from omni_ds.engine.runtime import Runtime
from omni_ds.plan.build import Plan
from omni_ds.plan.memory import Numerics
from omni_ds.plan.memory_table import memory_line


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]
    return "\n".join(lines)


def describe_parts(config: Config, runtime: Runtime) -> str:
    """Every part with its parameters, whether it trains, and its learning rate."""
    plan, omni = runtime.plan, config.omni
    rows = [_part("llm", plan.llm.parameters, plan.llm.trainable, part_lr(config, omni.llm.lr))]
    for meta in plan.encoders:
        section = omni.encoders[meta.name]
        rows.append(
            _part(meta.name, meta.tower_parameters, meta.tower_trainable, part_lr(config, section.lr))
        )
        rows.append(
            _part(
                f"{meta.name}.projector",
                meta.projector_parameters,
                meta.projector_trainable,
                part_lr(config, section.projector.lr),
            )
        )
    return _table(("part", "parameters", "trains", "lr"), rows)


def describe_unused(composition: Composition, runtime: Runtime) -> str:
    """What of a whole checkpoint is not trained but exported as it was; empty on ranks without encoders."""
    encoders = runtime.encoders.encoders()
    if composition.model is None or encoders.keys() != composition.model.towers.keys():
        return ""
    return composition.model.describe_unused(encoder_names(encoders))


def encoder_names(encoders: Mapping[str, nn.Module]) -> list[str]:
    """Global names of the parameters of encoders."""
    return [name for encoder in encoders.values() for name in encoder.hf_names().values()]


def _part(name: str, parameters: int, trains: bool, lr: float) -> tuple[str, ...]:
    return (name, f"{parameters:,}", "yes" if trains else "no", f"{lr:g}" if trains else "-")


def describe_attention(runtime: Runtime) -> str:
    """Which attention kernel runs, by device and dtype; and whose MLPs, rotary embeddings and norms."""
    head_dim = runtime.plan.llm.head_dim
    lines = ["attention: " + describe_backend(runtime.device, runtime.llm.dtype, head_dim)]
    if runtime.device.type == "cuda":
        liger = has_liger()
        chosen = "Liger's fused kernels" if liger else "HF's own; faster with liger-kernel installed"
        lines.append(f"gated MLPs, rotary embeddings of the LLM: {chosen}")
        chosen = "fused kernels of omni_ds" if liger else "torch's own; faster with liger-kernel installed"
        lines.append(f"norms, backward passes of GELU and gated MLPs: {chosen}")
    return "\n".join(lines)


def describe_plan(plan: Plan, numerics: Numerics) -> str:
    """Mesh, stages, encoder placement and predicted memory in a line each."""
    mesh = plan.mesh
    degrees = f"pipeline {mesh.pipe} x data {mesh.data} x sequence {mesh.sequence} x tensor {mesh.tensor}"
    if mesh.expert > 1:
        degrees += f", experts over {mesh.expert} of data x sequence"
    stages = ", ".join(f"{start}-{stop - 1}" for start, stop in plan.stages)
    names = ", ".join(meta.name for meta in plan.encoders) or "none"
    return (
        f"{mesh.world_size} ranks: {degrees}; decoder layers by stage: {stages}\n"
        f"encoders: {names}; placement {plan.options.placement}, ZeRO-{plan.options.encoder_zero_stage}\n"
        + memory_line(plan, numerics)
    )


def describe_data(train: IndexedDataset, held_out: Mapping[str, IndexedDataset]) -> str:
    """Usable and skipped rows of every set."""
    rows = []
    for name, dataset in {"train": train, **held_out}.items():
        skipped = "; ".join(f"{count} {reason}" for reason, count in sorted(dataset.skipped.items()))
        rows.append((name, f"{len(dataset):,}", skipped or "-"))
    return _table(("data", "samples", "skipped"), rows)
