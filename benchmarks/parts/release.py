"""The memory of a runtime that has trained enough."""

from __future__ import annotations

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from models.weight_gradient import ADD_PRODUCT
from omni_ds.engine.runtime import Runtime


def release(runtime: Runtime) -> None:
    """Its optimizers let go of the weights, and of sums, masters and moments. It cannot train any more.

    Hooks of weights hold optimizers, which hold the weights, in circles that Python does not collect.
    """
    for engine in (runtime.llm, runtime.encoders.engine):
        optimizer = getattr(engine, "optimizer", None)
        if isinstance(optimizer, BF16_Optimizer):
            _release(optimizer)


def _release(optimizer: BF16_Optimizer) -> None:
    optimizer.destroy()  # removes hooks
    for parameter in (p for group in optimizer.bf16_groups for p in group):
        parameter.grad = None
        if hasattr(parameter, ADD_PRODUCT):
            delattr(parameter, ADD_PRODUCT)
    states = [value for state in optimizer.optimizer.state.values() for value in state.values()]
    for tensor in (*optimizer.fp32_groups_gradients_flat, *optimizer.fp32_groups_flat_partition, *states):
        if isinstance(tensor, torch.Tensor):
            tensor.untyped_storage().resize_(0)
