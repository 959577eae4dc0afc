"""Tensor-parallel decoder layers out of DeepSpeed's column- and row-parallel linear layers.

Hidden states are the same on all tensor ranks. A block (attention, MLP) begins with column-parallel layers,
whose input gradients are partial sums, and ends with a row-parallel one, whose outputs are. So a block
all-reduces its output in forward and the gradient of its input in backward, once each: DeepSpeed would
reduce it for every column-parallel layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, set_autotp_mode
from deepspeed.module_inject.tp_shard import AutoTPMeta
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from omni_ds.errors import UserError
from omni_ds.parallel.layer_groups import LayerGroups, degree, index
from omni_ds.parallel.sums import sum_gradient, sum_parameter_gradients
from omni_ds.plan.region import Region
from omni_ds.plan.shards import even_bounds
from omni_ds.plan.tensor_rules import COLUMN, ROW, SUMMED, HeadShare, TensorSizes, head_share

# DeepSpeed counts a parameter in norms on every tensor rank where this is set, else on the first alone.
TENSOR_PARALLEL = "tensor_model_parallel"


@dataclass(frozen=True)
class _Sizes(AutoTPMeta):
    """The part of each tensor rank; takes the place of DeepSpeed's own division."""

    sizes: tuple[int, ...] = ()


class ColumnSlice(LinearLayer):
    """Rows of a linear layer's weight: output channels ``sizes[rank]``. Its block's input is summed in
    backward."""

    def __init__(self, linear: nn.Linear, group: ProcessGroup, sizes: tuple[int, ...]):
        super().__init__(linear, group, tp_meta=_Sizes(sizes=sizes))

    def _freeze_partition_sizes(self, total_size: int) -> tuple[int, ...]:
        assert sum(self.tp_meta.sizes) == total_size
        self._partition_sizes = self.tp_meta.sizes
        return self._partition_sizes

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


class RowSlice(LinearAllreduce):
    """Columns of a linear layer's weight: input channels ``sizes[rank]``; outputs are summed, then the whole
    bias is added."""

    def __init__(self, linear: nn.Linear, group: ProcessGroup, sizes: tuple[int, ...]):
        super().__init__(linear, group, tp_meta=_Sizes(sizes=sizes))

    _freeze_partition_sizes = ColumnSlice._freeze_partition_sizes


def shard_decoder_layer(
    layer: nn.Module, sizes: TensorSizes, styles: Mapping[str, str], groups: LayerGroups
) -> dict[str, Region]:
    """Replace the linear layers of an HF decoder layer by this rank's slices.

    Args:
        layer: parameters on the meta device, so that a whole weight is never allocated.
        sizes: of the whole LLM.
        styles: module name in the layer -> style (``omni_ds.plan.tensor_rules.layer_styles``); modules that
            the layer does not have, or that are not linear, are left as they are.
        groups: with ``tensor``, and with ``kv`` where there are fewer key-value heads than ranks.

    Returns:
        Local name -> Region of every parameter that is cut.

    Raises:
        UserError: a linear layer has a style that is not supported.
    """
    set_autotp_mode(training=True)
    regions: dict[str, Region] = {}
    blocks: set[str] = set()
    for name, style in styles.items():
        parent, _, leaf = name.rpartition(".")
        try:
            owner, module = layer.get_submodule(parent), layer.get_submodule(name)
        except AttributeError:
            continue
        if style == SUMMED:
            sum_parameter_gradients(module, groups.tensor)
        elif isinstance(module, nn.Linear):
            if style not in (COLUMN, ROW):
                raise UserError(
                    f"omni.llm: the tensor plan of HF's config gives {name} the style {style!r}, which is "
                    f"not supported; set tensor_parallel.autotp_size to 1"
                )
            cut = _cut(module, leaf, style, sizes, groups)
            setattr(owner, leaf, cut.module)
            regions |= {f"{name}.{parameter}": region for parameter, region in cut.regions.items()}
            blocks.add(parent)
    for block in sorted(blocks):
        layer.get_submodule(block).register_forward_pre_hook(
            partial(_enter, group=groups.tensor), with_kwargs=True
        )
    return regions


def _enter(_: nn.Module, args: tuple, kwargs: dict[str, Any], *, group: ProcessGroup) -> tuple[tuple, dict]:
    if args:
        return (sum_gradient(args[0], group), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": sum_gradient(kwargs["hidden_states"], group)}


@dataclass(frozen=True)
class _Cut:
    module: nn.Module
    regions: dict[str, Region]


def _cut(linear: nn.Linear, leaf: str, style: str, whole: TensorSizes, groups: LayerGroups) -> _Cut:
    """This rank's slice of a linear layer, and the regions of its parameters."""
    ranks, me = degree(groups.tensor), index(groups.tensor)
    dim = 0 if style == COLUMN else 1
    total = linear.weight.shape[dim]
    shares = [head_share(whole.heads, whole.kv_heads, ranks, rank) for rank in range(ranks)]
    if leaf in ("k_proj", "v_proj"):
        return _cut_kv(linear, shares[me], [share.kv for share in shares], total // whole.kv_heads, groups)
    if leaf in ("q_proj", "o_proj"):
        size = total // whole.heads
        bounds = (0, *(share.query[1] * size for share in shares))
    else:
        bounds = even_bounds(total, ranks)
    sizes = tuple(stop - start for start, stop in zip(bounds, bounds[1:], strict=False))
    shapes = {name: tuple(parameter.shape) for name, parameter in linear.named_parameters()}
    module = (ColumnSlice if style == COLUMN else RowSlice)(linear, groups.tensor, sizes)
    regions = {"weight": Region.of(shapes["weight"], dim, bounds[me], bounds[me + 1])}
    if "bias" in shapes and style == COLUMN:
        regions["bias"] = Region.of(shapes["bias"], 0, bounds[me], bounds[me + 1])
    return _Cut(module, regions)


def _cut_kv(
    linear: nn.Linear, share: HeadShare, held: list[tuple[int, int]], size: int, groups: LayerGroups
) -> _Cut:
    """Key or value heads. Copies of one head: each counted once, gradients summed over them."""
    sizes = tuple((stop - start) * size for start, stop in held)
    shapes = {name: tuple(parameter.shape) for name, parameter in linear.named_parameters()}
    if sum(sizes) != linear.out_features:  # copies: to DeepSpeed a layer in which each is a head of its own
        linear = nn.Linear(
            linear.in_features,
            sum(sizes),
            bias=linear.bias is not None,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        )
    module = ColumnSlice(linear, groups.tensor, sizes)
    if share.copies > 1:
        sum_parameter_gradients(module, groups.kv)
    for parameter in module.parameters():
        setattr(parameter, TENSOR_PARALLEL, share.first)
    start, stop = share.kv
    return _Cut(module, {n: Region.of(shape, 0, start * size, stop * size) for n, shape in shapes.items()})
