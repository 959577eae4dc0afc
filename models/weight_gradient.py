"""Gradients of a linear's weight, which can go into its sum without being a tensor of its own, and bias.

An optimizer that keeps fp32 sums of gradients gives its weights the attribute ``add_gradient_product``: a
function of two matrices that adds their product to the weight's sum. A linear's backward pass then hands it
the two factors of the weight's gradient, and autograd gets none: nothing is rounded to bf16, and without
padding nothing is written, read and added afterwards. (Megatron-LM calls it gradient accumulation fusion.)

A weight is asked for it in the forward pass, where it is the parameter itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ADD_PRODUCT = "add_gradient_product"
Cut = Callable[[Tensor], Tensor]  # a part of a product: a view with the numbers of the weight in their order
AddProduct = Callable[[Tensor, Tensor, Cut | None], None]


def adder(weight: Tensor) -> AddProduct | None:
    """What adds to the weight's sum. None where it has none, or where a hook waits for its gradient."""
    return None if weight._backward_hooks else getattr(weight, ADD_PRODUCT, None)


def weight_gradient(
    gradient: Tensor,
    x: Tensor,
    add: AddProduct | None,
    cut: Cut | None = None,
    shape: torch.Size | None = None,
) -> Tensor | None:
    """``gradient.T @ x`` [width, C] of gradient [T, width] and x [T, C]; None where it was added to a sum.

    cut: takes padding away from the product, shape: of the weight; both or neither.
    """
    if add is not None:
        add(gradient.t(), x, cut)
        return None
    product = gradient.t() @ x
    return product if cut is None else cut(product).reshape(shape)


def bias_gradient(gradient: Tensor) -> Tensor:
    """Sum of the rows of gradient [T, width]: [width]."""
    if not gradient.is_cuda:
        return gradient.sum(0)
    # Up to twice as quick as torch's sum over the slow dimension, with its errors (benchmarks/reports).
    return (gradient.new_ones(1, len(gradient)) @ gradient).squeeze(0)
