"""Which part of each parameter's fp32 weight and optimizer state lives on this rank.

DeepSpeed shards optimizer state by cutting flat buffers; a fragment is the piece of one held parameter that
falls into this rank's shard, as a range of the flattened local tensor. With (global name, region, offset,
length) a fragment means the same under every layout.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from models.parameters import HeldParameter
from omni_ds.checkpoint.copies import Part
from omni_ds.checkpoint.overlap import Piece
from omni_ds.parallel.expert import part_name
from omni_ds.plan.region import Region

WEIGHT = "weight"


@dataclass(frozen=True)
class Fragment:
    """A piece of a parameter held here.

    Attributes:
        name: global parameter name.
        region: of the whole parameter, that the local parameter holds.
        offset, length: range of the flattened local parameter.
        tensors: ``"weight"`` and each optimizer state (``exp_avg``, ...) -> 1-D fp32 view [length] into the
            optimizer's own memory; writing to it changes the optimizer.
        scalars: optimizer state without an axis, such as Adam's ``step``; an int where it is one.
        group: name of the parameter group.
        stepped: the tensor that the torch optimizer steps, of which this is a part.
    """

    name: str
    region: Region
    offset: int
    length: int
    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, float | int]
    group: str
    stepped: Tensor

    @property
    def part(self) -> Part:
        return self.name, self.region

    @property
    def piece(self) -> Piece:
        return Piece(self.region, self.offset, self.length)


def inner_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """The torch optimizer inside a DeepSpeed one, or the one that an engine without ZeRO runs as it is."""
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


def is_sharded(optimizer: object) -> bool:
    """Whether data ranks hold different fragments (ZeRO 1-3), not copies."""
    return not isinstance(optimizer, torch.optim.Optimizer)


def fragments(optimizer: object, held: Iterable[HeldParameter]) -> Iterator[Fragment]:
    """Fragments on this rank of the trainable parameters in ``held``, in that order.

    Args:
        optimizer: a DeepSpeed optimizer, or a torch one.
    """
    trainable = [h for h in held if h.parameter.requires_grad]
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        yield from _stage3(optimizer, trainable)
    elif isinstance(optimizer, torch.optim.Optimizer):
        yield from _whole(optimizer, trainable)
    else:
        assert isinstance(optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)), type(optimizer).__name__
        yield from _flat(optimizer, trainable)


def _whole(optimizer: torch.optim.Optimizer, held: Iterable[HeldParameter]) -> Iterator[Fragment]:
    """Without ZeRO the optimizer steps the model's own fp32 parameters."""
    groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for h in held:
        assert h.parameter.dtype == torch.float32, f"{h.name} has no fp32 master"
        if id(h.parameter) in groups:
            yield _fragment(h, 0, optimizer, h.parameter, groups[id(h.parameter)], 0, h.parameter.numel())


def _flat(optimizer, held: Iterable[HeldParameter]) -> Iterator[Fragment]:
    """ZeRO-1, ZeRO-2 and BF16_Optimizer: one flat fp32 partition per group, mapped by ``_hp_mapping``."""
    flat = (
        optimizer.fp32_groups_flat_partition
        if isinstance(optimizer, BF16_Optimizer)
        else optimizer.single_partition_of_fp32_groups
    )
    for h in held:
        mapping = getattr(h.parameter, "_hp_mapping", None)
        if mapping is None:
            continue
        group, where = mapping.param_group_index, mapping.hp_fragment_address
        offset = mapping.lp_fragment_address.start
        yield _fragment(h, offset, optimizer.optimizer, flat[group], group, where.start, where.numel)


def _stage3(optimizer: DeepSpeedZeroOptimizer_Stage3, held: Iterable[HeldParameter]) -> Iterator[Fragment]:
    """ZeRO-3: each parameter is cut evenly over the ranks, the last piece padded."""
    for h in held:
        number, start, length = optimizer.grad_position[optimizer.get_param_id(h.parameter)]
        offset = h.parameter.ds_tensor.ds_numel * optimizer._get_param_partition_rank(h.parameter)
        length = min(length, h.parameter.ds_numel - offset)
        if length > 0:
            group = optimizer.sub_group_to_group_id[number]
            flat = optimizer.fp32_partitioned_groups_flat[number]
            yield _fragment(h, offset, optimizer.optimizer, flat, group, start, length)


def _fragment(
    held: HeldParameter,
    offset: int,
    inner: torch.optim.Optimizer,
    stepped: Tensor,
    group: int,
    start: int,
    length: int,
) -> Fragment:
    """The fragment that lies at [start, start + length) of what the optimizer steps."""
    tensors, scalars = {WEIGHT: stepped.data.view(-1).narrow(0, start, length)}, {}
    for key, value in inner.state.get(stepped, {}).items():
        if torch.is_tensor(value) and value.shape == stepped.shape:
            tensors[key] = value.view(-1).narrow(0, start, length)
        else:
            scalars[key] = value if isinstance(value, int) else float(value)
    options = inner.param_groups[group]
    name = part_name(options) if "name" in options else str(group)
    return Fragment(held.name, held.region, offset, length, tensors, scalars, name, stepped)
