"""Shards a module's weights for ZeRO-3 as soon as it has them, so that they are never whole all at once.

DeepSpeed's engine would move the whole module to the device first and shard it there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from omni_ds.engine.encoder_ranks import EncoderRanks
from omni_ds.parallel.expert import is_expert


class Sharder:
    """Turns parameters into ZeRO-3's, one module after the other.

    Args:
        config: the engine's, for DeepSpeed.
        ranks: that share the weights.
        experts: group that shares an expert's weights; None without expert parallelism.
        dtype: of training.
        device: of buffers, which stay whole. Parameters pass over the accelerator of this process one by one
            and end there, or where ``offload_param`` says.
    """

    def __init__(
        self,
        config: dict[str, Any],
        ranks: EncoderRanks,
        experts: ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._config, self._ranks, self._experts = config, ranks, experts
        self._dtype, self._device = dtype, device
        self._convert: Callable[..., None] | None = None

    def shard(self, module: nn.Module) -> None:
        """Shard the parameters of a module, which has its weights; collective over the ranks."""
        parameters = list(module.parameters())
        for parameter in parameters:
            parameter.data = parameter.data.to(self._dtype)  # before it is moved
            if self._experts is not None and is_expert(parameter):
                parameter.ds_zero_partition_process_group = self._experts
        if parameters and self._convert is None:
            deepspeed.zero.Init(
                module=module,
                data_parallel_group=self._ranks.group,
                config_dict_or_path=self._config,
                dtype=self._dtype,
                mpu=self._ranks,
            )
            self._convert = parameters[0].convert_to_zero_parameters
        elif parameters:
            self._convert(param_list=parameters)
        for buffer in module.buffers():
            buffer.data = buffer.data.to(self._device)


def piece_of(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """A copy [n] of those elements of ``whole`` that this rank holds of a sharded parameter."""
    size = parameter.ds_tensor.ds_numel
    start = size * parameter.ds_zero_partition_rank
    return whole.reshape(-1)[start : start + size].clone()
