"""DeepSpeed's bf16 optimizer behind the interface of optimizer_adapter.py."""

from collections.abc import Iterable
from functools import partial

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import bwc_tensor_model_parallel_rank
from torch import Tensor
from torch.nn import Parameter

from models.weight_gradient import ADD_PRODUCT, Cut
from omni_ds.engine.gradient_norm import CLIP_EPSILON, squared_norm_of
from omni_ds.parallel.expert import expert_gradient_norms
from omni_ds.parallel.products import add_product, product


class Bf16Adapter:
    """bf16 weights with fp32 masters and accumulation (:class:`BF16_Optimizer`).

    Gradients join their sums without a copy. Where they do so at once (immediate_grad_update) and on a GPU,
    those that models/weight_gradient.py hands over as products are made in fp32 where the sum is; products
    with padding are made beside it.
    """

    def __init__(self, optimizer: BF16_Optimizer):
        self._optimizer = optimizer
        self._place = {
            id(parameter): (number, position)
            for number, group in enumerate(optimizer.bf16_groups)
            for position, parameter in enumerate(group)
        }
        if optimizer.autoep_folding_tp_group is not None:
            return
        optimizer._update_hp_grad = self._accumulate
        optimizer.clear_hp_grads = self._forget
        if not optimizer.immediate_grad_update:
            return
        for number, group in enumerate(optimizer.bf16_groups):
            for position, parameter in enumerate(group):
                sums = optimizer.fp32_groups_gradients[number]
                if sums[position].dtype == torch.float32 and sums[position].is_cuda:
                    add = partial(self._add_product, parameter, number, position)
                    setattr(parameter, ADD_PRODUCT, add)

    def _accumulate(self, parameter: Parameter, group: int, position: int, clear_lp_grads: bool) -> None:
        """DeepSpeed's own makes an fp32 copy of every gradient first, and adds it to zeros."""
        if parameter.grad is None:
            return
        total = self._sum(parameter, group, position)
        if self._optimizer.fp32_groups_has_gradients[group][position]:
            total.add_(parameter.grad.view(total.shape))
        else:
            total.copy_(parameter.grad.view(total.shape))
        self._optimizer.fp32_groups_has_gradients[group][position] = True
        if clear_lp_grads:
            parameter.grad.zero_()

    def _add_product(
        self, parameter: Parameter, group: int, position: int, a: Tensor, b: Tensor, cut: Cut | None
    ) -> None:
        total = self._sum(parameter, group, position)
        first = not self._optimizer.fp32_groups_has_gradients[group][position]
        self._optimizer.fp32_groups_has_gradients[group][position] = True
        if cut is not None:  # with its padding it is aligned, and twice as quick as one into the sum
            part = cut(product(a, b))
            total = total.view(part.shape)
            if first:
                total.copy_(part)
            else:
                total.add_(part)
            return
        total = total.view(a.shape[0], b.shape[1])
        if first:
            product(a, b, out=total)
        else:
            add_product(total, a, b)

    def _sum(self, parameter: Parameter, group: int, position: int) -> Tensor:
        parameter._hp_grad = self._optimizer.fp32_groups_gradients[group][position]
        return parameter._hp_grad

    def _forget(self) -> None:
        """DeepSpeed's own zeroes the sums, which the first gradient of a step overwrites; what has none is
        zeroed before it is read."""
        has = self._optimizer.fp32_groups_has_gradients
        for number, flags in enumerate(has):
            has[number] = [False] * len(flags)

    def squared_norm(self) -> Tensor:
        self.fill_missing(parameter for group in self._optimizer.bf16_groups for parameter in group)
        gradients, experts = self._optimizer.get_grads_for_norm()
        norms = expert_gradient_norms(experts)
        mpu, device = self._optimizer.mpu, self._optimizer.fp32_groups_flat_partition[0].device
        norms = norms if bwc_tensor_model_parallel_rank(mpu) == 0 else []
        group = None if mpu is None else mpu.get_model_parallel_group()
        return squared_norm_of(gradients, norms, device, group)

    def step(self, norm: float, clip: float) -> None:
        optimizer = self._optimizer
        if clip > 0 and norm > clip:  # what is stepped here, not every gradient
            torch._foreach_mul_(
                list(optimizer.fp32_groups_gradient_flat_partition), clip / (norm + CLIP_EPSILON)
            )
        optimizer.clip_grad = 0.0
        # Its own norm would read every gradient again, one by one; over experts it is a collective of all
        # stages, of which some may have no experts.
        nothing = [torch.zeros(1, device=optimizer.fp32_groups_flat_partition[0].device)]
        has_experts, optimizer.has_moe_layers = optimizer.has_moe_layers, False
        optimizer.get_grads_for_norm = lambda *_, **__: (nothing, {})
        try:
            optimizer.step()
        finally:
            del optimizer.get_grads_for_norm
            optimizer.has_moe_layers = has_experts
        optimizer.zero_grad()

    def skip(self) -> None:
        self._optimizer.clear_hp_grads()
        self._optimizer.clear_lp_grads(set_to_none=True)

    def refresh_weights(self) -> None:
        self._optimizer.update_lp_params()

    def gradient(self, parameter: Parameter) -> Tensor | None:
        group, position = self._place[id(parameter)]
        if not self._optimizer.fp32_groups_has_gradients[group][position]:
            return None
        return self._optimizer.fp32_groups_gradients[group][position]

    def fill_missing(self, parameters: Iterable[Parameter]) -> None:
        for parameter in parameters:
            if self.gradient(parameter) is not None:
                continue
            group, position = self._place[id(parameter)]
            self._sum(parameter, group, position).zero_()
            self._optimizer.fp32_groups_has_gradients[group][position] = True
