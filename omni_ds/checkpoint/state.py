"""Save and resume a run: weights, optimizer moments, schedules and data position, under any layout."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from omni_ds.checkpoint.fragments import WEIGHT, Fragment, fragments, inner_optimizer
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
        optimizer: the DeepSpeed optimizer.
        named: global name -> parameter on this rank.
        refresh: copies loaded fp32 weights into the model.
        writes: False on a rank whose fragments another one holds too, and saves.
    """

    name: str
    optimizer: object
    named: Mapping[str, nn.Parameter]
    refresh: Callable[[], None]
    writes: bool = True

    def fragments(self) -> Iterable[Fragment]:
        """The fragments this rank saves; a tied weight counts on the first stage that holds it."""
        if not self.writes:
            return ()
        owned = {n: p for n, p in self.named.items() if not getattr(p, "ds_pipe_replicated", False)}
        return fragments(self.optimizer, owned)

    def inner(self) -> torch.optim.Optimizer:
        """The torch optimizer inside."""
        return inner_optimizer(self.optimizer)


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
        UserError: the folder cannot be written; on every rank.
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
    table: list[tuple[str, int, int]] = []
    groups: dict[str, dict] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for fragment in engine.fragments():
        for key, value in fragment.tensors.items():
            tensors[fragment_key(fragment.name, fragment.offset, key)] = (
                value.detach().cpu().contiguous().clone()
            )
        table.append((fragment.name, fragment.offset, fragment.length))
        shapes[fragment.name] = fragment.shape
        states = sorted(key for key in fragment.tensors if key != WEIGHT)
        groups[fragment.group] = {"states": states, "scalars": dict(fragment.scalars)}
    file = f"{engine.name}-{rank:05d}.safetensors"
    if tensors:
        save_file(tensors, folder / file)
    return {"file": file, "fragments": table, "groups": groups, "shapes": shapes}


def _merge(manifests: Sequence[dict]) -> dict:
    """One engine's table: fragments by parameter, sorted; group scalars; shapes."""
    where: dict[str, list] = {}
    groups: dict[str, dict] = {}
    shapes: dict[str, list[int]] = {}
    for manifest in manifests:
        for name, offset, length in manifest["fragments"]:
            where.setdefault(name, []).append([offset, length, manifest["file"]])
        groups.update(manifest["groups"])
        shapes.update({name: list(shape) for name, shape in manifest["shapes"].items()})
    return {"fragments": {n: sorted(p) for n, p in where.items()}, "groups": groups, "shapes": shapes}


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
        _load_engine(folder, engine, index["engines"][engine.name])


def _load_engine(folder: Path, engine: EngineState, stored: dict) -> None:
    _make_states(engine, stored["groups"])
    files: dict[str, object] = {}

    def open_file(name: str):
        if name not in files:
            files[name] = safe_open(folder / name, framework="pt")
        return files[name]

    problems = []
    # Unlike saving, a tied copy is loaded on every stage that holds it.
    for fragment in fragments(engine.optimizer, engine.named):
        shape = stored["shapes"].get(fragment.name)
        if shape is None:
            problems.append(f"{fragment.name}: not in the checkpoint")
        elif tuple(shape) != fragment.shape:
            problems.append(
                f"{fragment.name}: {tuple(shape)} in the checkpoint, {fragment.shape} in the model"
            )
        else:
            for key, target in fragment.tensors.items():
                _copy_range(target, fragment, key, stored["fragments"][fragment.name], open_file)
    if problems:
        raise UserError(f"{folder} does not fit the model:\n  " + "\n  ".join(problems))


def _copy_range(target: Tensor, fragment: Fragment, key: str, pieces: Sequence, open_file: Callable) -> None:
    wanted_end = fragment.offset + fragment.length
    copied = 0
    for offset, length, file in pieces:
        start, end = max(offset, fragment.offset), min(offset + length, wanted_end)
        if start >= end:
            continue
        view = open_file(file).get_slice(fragment_key(fragment.name, offset, key))
        target[start - fragment.offset : end - fragment.offset].copy_(view[start - offset : end - offset])
        copied += end - start
    if copied != fragment.length:
        raise UserError(
            f"{fragment.name}: the checkpoint holds {copied} of the {fragment.length} elements of {key} "
            f"from {fragment.offset} on; a file is incomplete"
        )


def _make_states(engine: EngineState, groups: Mapping[str, dict]) -> None:
    """Optimizer state of the stored kind for every flat parameter, for fragments to be written into."""
    inner = engine.inner()
    for group in inner.param_groups:
        stored = groups.get(str(group.get("name")))
        if stored is None:
            continue
        for parameter in group["params"]:
            _make_state(inner, parameter, stored)
    if hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):  # ZeRO-3 steps flat sub-groups
        for number, flat in enumerate(engine.optimizer.fp32_partitioned_groups_flat):
            group = inner.param_groups[engine.optimizer.sub_group_to_group_id[number]]
            stored = groups.get(str(group.get("name")))
            if stored is not None:
                _make_state(inner, flat, stored)


def _make_state(inner: torch.optim.Optimizer, parameter: Tensor, stored: dict) -> None:
    if not stored["states"] and not stored["scalars"]:
        return  # saved before the first step
    state = inner.state[parameter]
    for key in stored["states"]:
        if key not in state:
            state[key] = torch.zeros_like(parameter.data)
    for key, value in stored["scalars"].items():
        if isinstance(value, int):  # DeepSpeed's own optimizers count in Python
            state[key] = value
            continue
        # One tensor each: a shared one would be advanced once per parameter.
        device = state[key].device if torch.is_tensor(state.get(key)) else _scalar_device(inner, parameter)
        state[key] = torch.tensor(value, dtype=torch.float32, device=device)


def _scalar_device(inner: torch.optim.Optimizer, parameter: Tensor) -> torch.device:
    fused = any(group.get("fused") or group.get("capturable") for group in inner.param_groups)
    return parameter.device if fused else torch.device("cpu")
