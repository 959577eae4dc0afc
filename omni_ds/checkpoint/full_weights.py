"""Whole parameters out of sharded engines, one at a time, for export."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor
from torch.distributed import ProcessGroup

from models.parameters import HeldParameter
from omni_ds.checkpoint.copies import Part
from omni_ds.plan.region import Region

NONE: Mapping[Part, Tensor] = MappingProxyType({})


def held_weights(held: Sequence[HeldParameter]) -> Iterator[tuple[HeldParameter, Tensor]]:
    """Yield each held parameter with its values [region.local_shape]; fp32 for trainable ones.

    Collective over the ranks among which ZeRO shards the engine: all of them iterate over the same names in
    the same order, and every one of them gets its own parts.
    """
    for h in held:
        parameter = h.parameter
        master = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        if master is not None:
            yield h, master.view(h.region.local_shape)
        elif hasattr(parameter, "ds_id"):  # frozen under ZeRO-3: gather the partitioned values
            with deepspeed.zero.GatheredParameters([parameter]), torch.no_grad():
                value = parameter.detach().clone()
            yield h, value
        else:
            yield h, parameter.detach()


def full_parameters(
    held: Sequence[HeldParameter],
    shards: ProcessGroup | None = None,
    *,
    originals: Mapping[Part, Tensor] = NONE,
    wanted: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (global name, whole tensor) for every name in ``held``, fp32 for trainable parameters.

    The tensors arrive on the first rank of ``shards`` alone, one at a time; the other ranks yield nothing
    but must iterate to the end: it is collective over ``shards`` and as ``held_weights``.

    Args:
        shards: CPU group of ranks that together hold every part of ``held`` at least once, and the same names
            in the same order; None where this rank holds them whole.
        originals: values to take instead of those in the model, given on all ranks of ``shards`` that hold
            the part or on none.
        wanted: False, on all ranks of ``shards``, only takes part in what other groups need; yields nothing.
    """
    rank = 0 if shards is None else dist.get_rank(shards)
    senders = _senders(held, shards, originals) if wanted else {}
    for name, parts_here in _by_name(held).items():
        mine = {h.region: originals.get((name, h.region), value) for h, value in held_weights(parts_here)}
        if not wanted:
            continue
        if rank == 0:
            yield name, _assemble(name, senders[name], mine, shards)
        else:
            for region, (sender, dtype) in senders[name].items():
                if sender == rank:
                    _send(mine[region], dtype, shards)


def _by_name(held: Sequence[HeldParameter]) -> dict[str, list[HeldParameter]]:
    found: dict[str, list[HeldParameter]] = {}
    for h in held:
        found.setdefault(h.name, []).append(h)
    return found


def _senders(
    held: Sequence[HeldParameter], shards: ProcessGroup | None, originals: Mapping[Part, Tensor]
) -> dict[str, dict[Region, tuple[int, torch.dtype]]]:
    """name -> region -> (the first rank of ``shards`` that holds it, dtype of its values)."""
    mine = [(h.name, h.region, _dtype(h, originals)) for h in held]
    everyone: list = [mine]
    if shards is not None:
        everyone = [None] * dist.get_world_size(shards)
        dist.all_gather_object(everyone, mine, group=shards)
    senders: dict[str, dict[Region, tuple[int, torch.dtype]]] = {}
    for rank, parts in enumerate(everyone):
        names = list(dict.fromkeys(name for name, *_ in parts))
        assert not senders or names == list(senders), f"rank {rank} of the group holds other parameters"
        for name, region, dtype in parts:
            if region.elements:
                senders.setdefault(name, {}).setdefault(region, (rank, dtype))
            else:
                senders.setdefault(name, {})
    for name, found in senders.items():
        elements, shape = sum(region.elements for region in found), next(iter(found)).shape
        assert elements == prod(shape), f"{name} {shape}: the group holds {elements} elements"
    return senders


def _dtype(held: HeldParameter, originals: Mapping[Part, Tensor]) -> torch.dtype:
    original = originals.get((held.name, held.region))
    if original is not None:
        return original.dtype
    return torch.float32 if held.parameter.requires_grad else held.parameter.dtype


def _assemble(
    name: str,
    parts: Mapping[Region, tuple[int, torch.dtype]],
    mine: Mapping[Region, Tensor],
    shards: ProcessGroup | None,
) -> Tensor:
    first, (sender, dtype) = next(iter(parts.items()))
    if first.is_whole and sender == 0:
        return mine[first]
    whole = torch.empty(first.shape, dtype=dtype)
    matrix = whole.view(Region.whole(first.shape).height, -1)
    for region, (sender, part_dtype) in parts.items():
        assert part_dtype == dtype, f"{name} has parts of {part_dtype} and of {dtype}"
        value = mine[region] if sender == 0 else _receive(sender, region.elements, dtype, shards)
        rectangle = matrix[slice(*region.rows), slice(*region.columns)]
        rectangle.copy_(value.reshape(region.height, region.width))
    return whole


# As bytes: gloo does not know every dtype.
def _send(value: Tensor, dtype: torch.dtype, group: ProcessGroup) -> None:
    assert value.dtype == dtype
    dist.send(value.cpu().contiguous().view(-1).view(torch.uint8), group=group, group_dst=0)


def _receive(sender: int, elements: int, dtype: torch.dtype, group: ProcessGroup) -> Tensor:
    value = torch.empty(elements, dtype=dtype)
    dist.recv(value.view(torch.uint8), group=group, group_src=sender)
    return value
