"""The Triton kernels of models/norms.py: RMSNorm and, with CENTRED, LayerNorm of rows.

Pointers are to [rows, WIDTH] tensors whose rows stand side by side, to ``weight`` and ``bias`` [WIDTH], to
``mean`` and ``rstd`` [rows] fp32, and to ``d_weight`` and ``d_bias`` [programs, WIDTH] fp32. BLOCK: WIDTH
rounded up to a power of two; ROWS: of a tile. What a flag leaves out is not read or written.
"""

import triton
import triton.language as tl


@triton.jit
def norm_forward(
    x, weight, bias, out, mean, rstd, rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One tile a program; ``rstd`` (and ``mean``) are for the backward pass."""
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = (row < rows)[:, None] & inside[None, :]
    at = row.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    if CENTRED:
        middle = tl.sum(value, axis=1) / WIDTH
        tl.store(mean + row, middle, mask=row < rows)
        value = tl.where(real, value - middle[:, None], 0.0)
    spread = tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + eps)
    tl.store(rstd + row, spread, mask=row < rows)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    value = value * spread[:, None] * scale[None, :]
    if BIAS:
        value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=real)


@triton.jit
def norm_backward(
    x, weight, gradient, passed, mean, rstd, d_x, d_weight, d_bias, rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr,
    PASSED: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and ``passed`` added to it. A program walks every ``programs``-th tile and keeps the
    sums of its weight gradients in registers."""
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    weight_sum, bias_sum = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        real = (row < rows)[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
        g = tl.load(gradient + at, mask=real, other=0.0).to(tl.float32)
        spread = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        if CENTRED:
            value = value - tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.where(real, value * spread, 0.0)
        weight_sum += tl.sum(g * normed, axis=0)
        if BIAS:
            bias_sum += tl.sum(g, axis=0)
        g = g * scale
        d = g - normed * (tl.sum(g * normed, axis=1)[:, None] / WIDTH)
        if CENTRED:
            d -= tl.sum(g, axis=1)[:, None] / WIDTH
        d = d * spread
        if PASSED:
            d += tl.load(passed + at, mask=real, other=0.0).to(tl.float32)
        tl.store(d_x + at, d.to(d_x.dtype.element_ty), mask=real)
    at = tl.program_id(0) * WIDTH + columns
    tl.store(d_weight + at, weight_sum, mask=inside)
    if BIAS:
        tl.store(d_bias + at, bias_sum, mask=inside)
