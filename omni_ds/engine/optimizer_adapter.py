"""One way to ask DeepSpeed's optimizers for a norm, a clipped step or a skipped one.

Two engines train one model, so gradients are clipped by one norm over both (DESIGN: one gradient norm and
one clip). Each DeepSpeed optimizer computes its own norm inside ``step``; the adapters take it out before
the step and put the joint norm in.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import (
    combine_grad_norm_groups,
    is_model_parallel_parameter,
)
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from torch import Tensor
from torch.nn import Parameter

from omni_ds.engine.bf16_adapter import Bf16Adapter
from omni_ds.engine.gradient_norm import CLIP_EPSILON, squared_norm_of
from omni_ds.parallel.expert import expert_gradient_norms, is_expert


class OptimizerAdapter(Protocol):
    def squared_norm(self) -> Tensor:
        """Squared norm of the reduced gradients over all ranks that share this optimizer: a float64 scalar
        where the gradients are, so that nothing has to wait for it yet."""
        ...

    def step(self, norm: float, clip: float) -> None:
        """Clip by ``norm`` to ``clip`` (0: no clipping), update weights, clear gradients."""
        ...

    def skip(self) -> None:
        """Clear the gradients without an update."""
        ...

    def refresh_weights(self) -> None:
        """Copy the fp32 master weights into the model, after they were loaded."""
        ...

    def gradient(self, parameter: Parameter) -> Tensor | None:
        """What was accumulated for ``parameter`` in this step and is still to be reduced; None if nothing."""
        ...

    def fill_missing(self, parameters: Iterable[Parameter]) -> None:
        """Zeros for those of ``parameters`` for which nothing was accumulated: every rank must reduce the
        same tensors."""
        ...


def _squared(norm: Tensor | float) -> Tensor:
    # DeepSpeed reports a non-finite norm as -1.
    value = torch.as_tensor(norm, device=get_accelerator().current_device_name()).double()
    return torch.where(value >= 0, value**2, torch.full_like(value, math.inf))


class _Sharded:
    """ZeRO-1 and 2 in fp32 (:class:`DeepSpeedZeroOptimizer`)."""

    _norm_method = "scaled_global_norm"

    def __init__(self, optimizer: DeepSpeedZeroOptimizer):
        self._optimizer = optimizer

    def squared_norm(self) -> Tensor:
        # DeepSpeed sums every parameter group over the stages by itself; one without experts has fewer groups
        # than the others, and they would wait for it.
        optimizer, name = self._optimizer, "_model_parallel_all_reduce"
        setattr(optimizer, name, lambda **_: None)
        try:
            squared = _squared(optimizer.scaled_global_norm())
        finally:
            optimizer.__dict__.pop(name)
        optimizer._model_parallel_all_reduce(tensor=squared, op=dist.ReduceOp.SUM)
        return squared

    @contextmanager
    def _joint_norm(self, norm: float, clip: float) -> Iterator[None]:
        optimizer = self._optimizer
        before = optimizer.clip_grad
        setattr(optimizer, self._norm_method, self._norm_result(norm))
        optimizer.clip_grad = clip
        try:
            yield
        finally:
            optimizer.__dict__.pop(self._norm_method)
            optimizer.clip_grad = before

    def _norm_result(self, norm: float):
        # Both optimizers divide the norm by their loss scale, which must therefore stay a tensor.
        return lambda *_, **__: torch.tensor(norm, dtype=torch.float32, device=self._optimizer.device)

    def step(self, norm: float, clip: float) -> None:
        with self._joint_norm(norm, clip):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def skip(self) -> None:
        # A non-finite norm is DeepSpeed's own sign to drop the step and free every gradient buffer, unless
        # it was told not to look.
        before = getattr(self._optimizer, "check_grad_overflow", True)
        self._optimizer.check_grad_overflow = True
        try:
            self.step(math.inf, 0.0)
        finally:
            self._optimizer.check_grad_overflow = before

    def refresh_weights(self) -> None:
        self._optimizer.update_lp_params()
        for group in range(len(self._optimizer.bit16_groups)):
            self._optimizer._update_model_bit16_weights(group)

    def gradient(self, parameter: Parameter) -> Tensor | None:
        return self._optimizer.get_gradient_for_reduction(parameter)

    def fill_missing(self, parameters: Iterable[Parameter]) -> None:
        for parameter in parameters:
            if self.gradient(parameter) is not None:
                continue
            if self._optimizer.use_grad_accum_attribute:
                dtype = self._optimizer.gradient_accumulation_dtype
                parameter.grad_accum = torch.zeros_like(parameter, dtype=dtype)
            else:
                parameter.grad = torch.zeros_like(parameter)
        # On a rank without any backward nothing has made the buffers for the reduction.
        self._optimizer.setup_buckets()


class _Stage3(_Sharded):
    """ZeRO-3 (:class:`DeepSpeedZeroOptimizer_Stage3`)."""

    _norm_method = "_get_norm_groups"

    def step(self, norm: float, clip: float) -> None:
        super().step(norm, clip)
        # DeepSpeed overwrites the last step's gradients in the first backward of a step only; a parameter
        # that has its first one in a later window would add to them.
        self._optimizer.grad_partitions_flat_buffer.zero_()

    def squared_norm(self) -> Tensor:
        return _squared(combine_grad_norm_groups(self._optimizer._get_norm_groups()))

    def _norm_result(self, norm: float):
        value = torch.tensor(norm, dtype=torch.float32, device=self._optimizer.device)
        return lambda *_, **__: [value]

    def refresh_weights(self) -> None:
        optimizer = self._optimizer
        for group, partition in enumerate(optimizer.fp32_partitioned_groups_flat):
            if optimizer.fp16_partitioned_groups_flat[group] is not None:
                optimizer.fp16_partitioned_groups_flat[group].data.copy_(partition.data)
            optimizer._unflatten_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def fill_missing(self, parameters: Iterable[Parameter]) -> None:
        pass  # every backward of ZeRO-3 is planned on every rank, and reduces


class _Unsharded:
    """ZeRO-0 in fp32: torch's optimizer itself, the same on every replica.

    DeepSpeed's norm for it counts the gradients of one stage.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, mpu: object):
        self._optimizer, self._mpu = optimizer, mpu

    def _parameters(self) -> Iterator[Parameter]:
        return (p for group in self._optimizer.param_groups for p in group["params"])

    def squared_norm(self) -> Tensor:
        first = bwc_tensor_model_parallel_rank(self._mpu) == 0
        counted: list[Tensor] = []
        experts: dict[str, list[Tensor]] = {}
        for p in self._parameters():
            if is_expert(p):
                experts.setdefault(p.group_name, []).append(p.grad)
            elif not getattr(p, "ds_pipe_replicated", False) and (first or is_model_parallel_parameter(p)):
                counted.append(p.grad)
        norms = expert_gradient_norms(experts)  # collective, on every tensor rank
        device, group = next(self._parameters()).device, self._mpu.get_model_parallel_group()
        return squared_norm_of(counted, norms if first else [], device, group)

    @torch.no_grad()
    def step(self, norm: float, clip: float) -> None:
        if clip > 0 and norm > clip:
            torch._foreach_mul_([p.grad for p in self._parameters()], clip / (norm + CLIP_EPSILON))
        self._optimizer.step()
        self.skip()

    def skip(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def refresh_weights(self) -> None:
        pass  # the weights are the masters

    def gradient(self, parameter: Parameter) -> Tensor | None:
        return parameter.grad

    def fill_missing(self, parameters: Iterable[Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def adapt(optimizer: object, mpu: object = None) -> OptimizerAdapter:
    """The adapter of ``engine.optimizer``; ``mpu`` is the pipeline engine's, for one that is not sharded."""
    if isinstance(optimizer, BF16_Optimizer):
        return Bf16Adapter(optimizer)
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return _Stage3(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        return _Unsharded(optimizer, mpu)
    assert isinstance(optimizer, DeepSpeedZeroOptimizer), f"unknown optimizer {type(optimizer).__name__}"
    return _Sharded(optimizer)
