"""Save and resume a run: weights, optimizer moments, schedules and data position, under any layout."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from models.parameters import HeldParameter
from omni_ds.checkpoint.copies import Part
from omni_ds.checkpoint.fill import fill
from omni_ds.checkpoint.fragments import WEIGHT, Fragment, fragments
from omni_ds.checkpoint.layout import (
    FORMAT,
    INDEX,
    LATEST,
    fragment_key,
    latest_tag,
    prune,
    tag_of,
    write_atomically,
)
from omni_ds.errors import UserError
from omni_ds.parallel.agreement import AgreedError, broadcast_from_rank_0


@dataclass(frozen=True)
class EngineState:
    """One engine as the checkpoint sees it.

    Attributes:
        name: file prefix, ``llm`` or ``encoders``.
        optimizer: DeepSpeed's, or torch's own with ZeRO-0.
        held: its parameters on this rank.
        refresh: copies loaded fp32 weights into the model.
        owned: parts that this rank writes; None where no other rank holds copies.
    """

    name: str
    optimizer: object
    held: Sequence[HeldParameter]
    refresh: Callable[[], None]
    owned: Set[Part] | None = None

    def fragments(self) -> Iterable[Fragment]:
        """All fragments on this rank, for loading."""
        return fragments(self.optimizer, self.held)

    def owned_fragments(self) -> Iterable[Fragment]:
        """Those that this rank writes; a tied weight counts on the first stage that holds it."""
        first = [h for h in self.held if not getattr(h.parameter, "ds_pipe_replicated", False)]
        found = fragments(self.optimizer, first)
        return (f for f in found if self.owned is None or f.part in self.owned)


def save(
    root: Path,
    step: int,
    engines: Sequence[EngineState],
    run_state: dict,
    group: ProcessGroup,
    keep_last: int | None,
) -> Path:
    """Write a checkpoint; collective over the CPU ``group``.

    Args:
        root: folder of all checkpoints.
        step: optimizer steps done.
        run_state: JSON-able state that is equal on all ranks (schedules, data position, fingerprint).
        keep_last: how many to keep; None keeps all.

    Raises:
        UserError: the folder cannot be written, or parts do not make up a parameter; on every rank.
    """
    rank = dist.get_rank(group)
    final = root / tag_of(step)
    temporary = final.with_name(final.name + ".tmp")
    if rank == 0:  # what a killed run left, perhaps of more ranks than there are now
        shutil.rmtree(temporary, ignore_errors=True)
    dist.barrier(group)
    manifest, error = None, None
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        manifest = {engine.name: _write_engine(temporary, engine, rank) for engine in engines}
    except (OSError, SafetensorError) as caught:
        error = f"cannot write the checkpoint {final}: {caught}; free space or change omni.output_dir"
    gathered: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (manifest, error), group=group)
    failed = next((message for _, message in gathered if message), None)
    if failed:
        raise AgreedError(failed)
    broadcast_from_rank_0(lambda: _publish(final, step, run_state, gathered, keep_last), group)
    return final


def _publish(
    final: Path, step: int, run_state: dict, gathered: Sequence[tuple], keep_last: int | None
) -> None:
    """Index, final name and ``latest``: rank 0, when all ranks have written their files."""
    root, temporary = final.parent, final.with_name(final.name + ".tmp")
    try:
        files = {path.name: path.stat().st_size for path in sorted(temporary.glob("*.safetensors"))}
        index = {"format": FORMAT, "step": step, "run": run_state, "files": files, "engines": {}}
        for name in sorted({name for manifests, _ in gathered for name in manifests}):
            of_engine = [manifests[name] for manifests, _ in gathered if name in manifests]
            index["engines"][name] = _merge(of_engine)
        write_atomically(temporary / INDEX, json.dumps(index))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        write_atomically(root / LATEST, final.name + "\n")
    except OSError as error:
        raise UserError(
            f"cannot write the checkpoint {final}: {error}; free space or change omni.output_dir"
        ) from None
    prune(root, keep_last)


def _write_engine(folder: Path, engine: EngineState, rank: int) -> dict:
    tensors: dict[str, Tensor] = {}
    table: dict[str, dict] = {}
    groups: dict[str, dict] = {}
    file = f"{engine.name}-{rank:05d}.safetensors"
    for fragment in engine.owned_fragments():
        for key, value in fragment.tensors.items():
            stored = fragment_key(fragment.name, fragment.piece, key)
            assert stored not in tensors, f"{stored} is held twice"
            tensors[stored] = value.detach().cpu().contiguous().clone()
        entry = table.setdefault(
            fragment.name, {"shape": fragment.region.shape, "group": fragment.group, "pieces": []}
        )
        region = fragment.region
        entry["pieces"].append([*region.rows, *region.columns, fragment.offset, fragment.length, file])
        states = sorted(key for key in fragment.tensors if key != WEIGHT)
        groups[fragment.group] = {"states": states, "scalars": dict(fragment.scalars)}
    if tensors:
        save_file(tensors, folder / file)
    return {"parameters": table, "groups": groups}


def _merge(manifests: Sequence[dict]) -> dict:
    """One engine's table: shape, group and pieces of every parameter; state and scalars of every group.

    Raises:
        UserError: the ranks did not write every element once.
    """
    parameters: dict[str, dict] = {}
    groups: dict[str, dict] = {}
    for manifest in manifests:
        groups.update(manifest["groups"])
        for name, entry in manifest["parameters"].items():
            known = parameters.setdefault(name, {**entry, "shape": list(entry["shape"]), "pieces": []})
            known["pieces"] += entry["pieces"]
    for name, entry in parameters.items():
        entry["pieces"].sort()
        written = sum(length for *_, length, _ in entry["pieces"])
        if written != math.prod(entry["shape"]):
            raise UserError(
                f"checkpoint: {written} elements of {name} {entry['shape']} would be written; the layers' "
                "regions are wrong. The last checkpoint is untouched; please report this"
            )
    return {"parameters": parameters, "groups": groups}


def find(root: Path, tag: str | None) -> Path:
    """The checkpoint to resume from: ``tag``, a path to one, or the latest under ``root``.

    Raises:
        UserError: there is none.
    """
    if tag is not None:
        for folder in (Path(tag), root / tag):
            if (folder / INDEX).is_file():
                return folder
        raise UserError(f"--resume {tag}: no checkpoint there or under {root}")
    latest = latest_tag(root)
    if latest is None:
        raise UserError(f"--resume: no complete checkpoint under {root}; start without --resume")
    return root / latest


def load(folder: Path, index: dict, engines: Sequence[EngineState]) -> None:
    """Fill this rank's fragments from a checkpoint, whatever layout wrote it. Contains no collective.

    Call ``refresh`` of every engine afterwards, on all ranks: it copies the loaded fp32 weights to the model.

    Raises:
        UserError: the checkpoint lacks a trainable parameter, or has it in another shape.
    """
    for engine in engines:
        if engine.name not in index["engines"]:
            raise UserError(f"{folder} has no state of the {engine.name}; was it written with them frozen?")
        fill(folder, engine.optimizer, engine.held, index["engines"][engine.name])
