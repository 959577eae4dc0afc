"""Whole fp32 parameters out of sharded engines, one at a time, for export."""

from collections.abc import Iterator, Mapping

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn


def full_parameters(named: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
    """Yield (global name, whole tensor) for every parameter in ``named``; fp32 for trainable ones.

    Collective over the ranks that share the engine: all of them iterate over the same names in the same
    order, and every one of them gets the tensors.
    """
    for name, parameter in named.items():
        master = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        if master is not None:
            yield name, master.view(_shape(parameter))
        elif hasattr(parameter, "ds_id"):  # frozen under ZeRO-3: gather the partitioned values
            with deepspeed.zero.GatheredParameters([parameter]), torch.no_grad():
                yield name, parameter.detach().clone()
        else:
            yield name, parameter.detach()


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
