"""Which part of each parameter's fp32 weight and optimizer state lives on this rank.

DeepSpeed shards optimizer state by cutting flat buffers; a fragment is the piece of one parameter that
falls into this rank's shard, as a range of the flattened parameter. With (global name, offset, length) a
fragment means the same under every layout.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor, nn

WEIGHT = "weight"


@dataclass(frozen=True)
class Fragment:
    """A piece of a parameter held here.

    Attributes:
        name: global parameter name.
        shape: of the whole parameter.
        offset, length: range of the flattened parameter.
        tensors: ``"weight"`` and each optimizer state (``exp_avg``, ...) -> 1-D fp32 view [length] into the
            optimizer's own memory; writing to it changes the optimizer.
        scalars: optimizer state without an axis, such as Adam's ``step``; an int where it is one.
        group: name of the parameter group.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    length: int
    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, float | int]
    group: str


def fragments(optimizer: object, named: Mapping[str, nn.Parameter]) -> Iterator[Fragment]:
    """Fragments on this rank of the trainable parameters in ``named``, in that order.

    Args:
        optimizer: a DeepSpeed optimizer; torch's own without ZeRO, where every replica holds everything.
        named: global name -> parameter.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        yield from _whole(optimizer, named)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        yield from _stage3(optimizer, named)
    else:
        yield from _flat(optimizer, named)


def inner_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """The torch optimizer inside DeepSpeed's; itself without ZeRO."""
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


def _whole(optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> Iterator[Fragment]:
    """ZeRO-0: the weights are the masters, and nothing is cut."""
    group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for name, parameter in named.items():
        if id(parameter) not in group_of:
            continue
        tensors, scalars = {WEIGHT: parameter.data.view(-1)}, {}
        for key, value in optimizer.state.get(parameter, {}).items():
            if torch.is_tensor(value) and value.shape == parameter.shape:
                tensors[key] = value.view(-1)
            else:
                scalars[key] = value if isinstance(value, int) else float(value)
        group = _group(optimizer, group_of[id(parameter)])
        yield Fragment(name, tuple(parameter.shape), 0, parameter.numel(), tensors, scalars, group)


def _flat(optimizer, named: Mapping[str, nn.Parameter]) -> Iterator[Fragment]:
    """ZeRO-1, ZeRO-2 and BF16_Optimizer: one flat fp32 partition per group, mapped by ``_hp_mapping``."""
    flat = (
        optimizer.fp32_groups_flat_partition
        if isinstance(optimizer, BF16_Optimizer)
        else optimizer.single_partition_of_fp32_groups
    )
    inner = optimizer.optimizer
    for name, parameter in named.items():
        mapping = getattr(parameter, "_hp_mapping", None)
        if not parameter.requires_grad or mapping is None:
            continue
        group = mapping.param_group_index
        where = mapping.hp_fragment_address
        tensors, scalars = {WEIGHT: mapping.hp_fragment.data}, {}
        for key, value in inner.state.get(flat[group], {}).items():
            if torch.is_tensor(value) and value.numel() == flat[group].numel():
                tensors[key] = value.view(-1).narrow(0, where.start, where.numel)
            else:
                scalars[key] = value if isinstance(value, int) else float(value)
        address = mapping.lp_fragment_address
        yield Fragment(
            name, tuple(parameter.shape), address.start, address.numel, tensors, scalars, _group(inner, group)
        )


def _stage3(
    optimizer: DeepSpeedZeroOptimizer_Stage3, named: Mapping[str, nn.Parameter]
) -> Iterator[Fragment]:
    """ZeRO-3: each parameter is cut evenly over the ranks, the last piece padded."""
    for name, parameter in named.items():
        if not parameter.requires_grad:
            continue
        group, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
        whole = parameter.ds_numel
        offset = parameter.ds_tensor.ds_numel * optimizer._get_param_partition_rank(parameter)
        held = max(0, min(length, whole - offset))
        flat = optimizer.fp32_partitioned_groups_flat[group]
        tensors, scalars = {WEIGHT: flat.data.narrow(0, start, held)}, {}
        for key, value in optimizer.optimizer.state.get(flat, {}).items():
            if torch.is_tensor(value) and value.numel() == flat.numel():
                tensors[key] = value.view(-1).narrow(0, start, held)
            else:
                scalars[key] = value if isinstance(value, int) else float(value)
        group_name = _group(optimizer.optimizer, optimizer.sub_group_to_group_id[group])
        if held:
            yield Fragment(name, tuple(parameter.ds_shape), offset, held, tensors, scalars, group_name)


def _group(optimizer: torch.optim.Optimizer, index: int) -> str:
    return str(optimizer.param_groups[index].get("name", index))
