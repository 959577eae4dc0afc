"""Filling an optimizer's fp32 weights and state from a checkpoint that any layout wrote."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.parameters import HeldParameter
from omni_ds.checkpoint.fragments import Fragment, fragments, inner_optimizer
from omni_ds.checkpoint.layout import fragment_key
from omni_ds.checkpoint.overlap import Piece, covers, meetings
from omni_ds.errors import UserError
from omni_ds.plan.region import Region

Reader = Callable[[str, str, slice], Tensor]
"""(file, stored name, range) -> that range of a stored tensor."""


def fill(folder: Path, optimizer: object, held: Sequence[HeldParameter], stored: Mapping) -> None:
    """Fill this rank's fragments; reads no more than it needs. Contains no collective.

    Args:
        stored: the engine's table in the index.

    Raises:
        UserError: the checkpoint lacks a trainable parameter or a part of one, or has another shape.
    """
    parameters, groups = stored["parameters"], stored["groups"]
    _check(folder, fragments(optimizer, held), parameters)
    inner = inner_optimizer(optimizer)
    for fragment in fragments(optimizer, held):
        _make_state(inner, fragment.stepped, groups[parameters[fragment.name]["group"]])
    read = _reader(folder)
    for fragment in fragments(optimizer, held):
        _fill_fragment(folder, fragment, parameters[fragment.name], read)


def _check(folder: Path, wanted: Iterable[Fragment], parameters: Mapping[str, dict]) -> None:
    problems = []
    for fragment in wanted:
        shape, entry = fragment.region.shape, parameters.get(fragment.name)
        if entry is None:
            problems.append(f"{fragment.name}: not in the checkpoint")
        elif tuple(entry["shape"]) != shape:
            problems.append(
                f"{fragment.name}: {tuple(entry['shape'])} in the checkpoint, {shape} in the model"
            )
    if problems:
        raise UserError(f"{folder} does not fit the model:\n  " + "\n  ".join(dict.fromkeys(problems)))


def _reader(folder: Path) -> Reader:
    files: dict[str, object] = {}

    def read(file: str, name: str, part: slice) -> Tensor:
        if file not in files:
            files[file] = safe_open(folder / file, framework="pt")
        return files[file].get_slice(name)[part]

    return read


@torch.no_grad()
def _fill_fragment(folder: Path, fragment: Fragment, entry: Mapping, read: Reader) -> None:
    plan = []
    for top, bottom, left, right, offset, length, file in entry["pieces"]:
        piece = Piece(Region(fragment.region.shape, (top, bottom), (left, right)), offset, length)
        windows = list(meetings(fragment.piece, piece))
        if windows:
            plan.append((piece, file, windows))
    if not covers(fragment.length, (target for *_, windows in plan for target, _ in windows)):
        region, stop = fragment.region, fragment.offset + fragment.length
        raise UserError(
            f"{folder}: {fragment.name} is not all there exactly once (rows {region.rows}, columns "
            f"{region.columns}, of that elements {fragment.offset} to {stop}); the checkpoint is incomplete, "
            "resume from another one"
        )
    for piece, file, windows in plan:
        start = min(source.start for _, source in windows)
        stop = max(source.stop for _, source in windows)
        for key, target in fragment.tensors.items():
            name = fragment_key(fragment.name, piece, key)
            try:
                values = read(file, name, slice(start, stop))
            except SafetensorError as error:
                raise UserError(f"{folder / file}: no {name} ({error}); resume from another one") from None
            for into, source in windows:
                into.view(target).copy_(source.view(values, start))


def _make_state(inner: torch.optim.Optimizer, stepped: Tensor, stored: Mapping) -> None:
    """Optimizer state of the stored kind, for fragments to be written into."""
    if not stored["states"] and not stored["scalars"]:
        return  # saved before the first step
    state = inner.state[stepped]
    for key in stored["states"]:
        if key not in state:
            state[key] = torch.zeros_like(stepped.data)
    for key, value in stored["scalars"].items():
        if isinstance(value, int):  # DeepSpeed's own optimizers count in Python
            state[key] = value
            continue
        # One tensor each: a shared one would be advanced once per parameter.
        device = state[key].device if torch.is_tensor(state.get(key)) else _scalar_device(inner, stepped)
        state[key] = torch.tensor(value, dtype=torch.float32, device=device)


def _scalar_device(inner: torch.optim.Optimizer, stepped: Tensor) -> torch.device:
    fused = any(group.get("fused") or group.get("capturable") for group in inner.param_groups)
    return stepped.device if fused else torch.device("cpu")
