"""The Triton kernels of models/activation_gradients.py: one program for a tile.

Pointers are to [rows, width] tensors whose rows stand side by side, and to ``sums`` fp32 [tiles below each
other, width]: of the gradients' columns in each tile, where SUMS.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of this program: which tile from the top, its columns, which numbers are real, and where they stand."""
    across = tl.cdiv(width, COLUMNS)
    below = tl.program_id(0) // across
    columns = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    row = below * ROWS + tl.arange(0, ROWS)
    real = (row < rows)[:, None] & (columns < width)[None, :]
    return below, columns, real, row.to(tl.int64)[:, None] * width + columns[None, :]


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    """GELU of x fp32 and its derivative, as ``torch.nn.functional.gelu`` defines them."""
    if TANH:
        scale: tl.constexpr = 0.7978845608028654  # sqrt(2 / pi)
        square = x * x
        inner = scale * x * (1 + 0.044715 * square)
        tanh = 2 * tl.sigmoid(2 * inner) - 1
        share = 0.5 * (1 + tanh)
        slope = 0.5 * x * (1 - tanh * tanh) * scale * (1 + 3 * 0.044715 * square)
    else:
        share = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        slope = x * tl.exp(-0.5 * x * x) * 0.3989422804014327  # x times the normal density
    return x * share, share + slope


@triton.jit
def gelu_backward(
    between, gradient, d_between, sums, rows, width,
    TANH: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """d_between: the gradient of ``between``; then GELU(between) where the gradient of it was."""
    below, columns, real, at = _tile(rows, width, ROWS, COLUMNS)
    g = tl.load(gradient + at, mask=real, other=0.0).to(tl.float32)
    x = tl.load(between + at, mask=real, other=0.0).to(tl.float32)
    active, slope = _gelu(x, TANH)
    d = (g * slope).to(d_between.dtype.element_ty)
    tl.store(gradient + at, active.to(gradient.dtype.element_ty), mask=real)
    tl.store(d_between + at, d, mask=real)
    if SUMS:
        tl.store(sums + below * width + columns, tl.sum(d.to(tl.float32), axis=0), mask=columns < width)


@triton.jit
def gated_backward(
    gate, up, gradient, gate_sums, up_sums, rows, width,
    SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Where gate and up were, their gradients; where the gradient of silu(gate) * up was, that product."""
    below, columns, real, at = _tile(rows, width, ROWS, COLUMNS)
    g = tl.load(gradient + at, mask=real, other=0.0).to(tl.float32)
    a = tl.load(gate + at, mask=real, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=real, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(a)
    silu = a * sigmoid
    d_gate = (g * b * (sigmoid + silu * (1 - sigmoid))).to(gate.dtype.element_ty)
    d_up = (g * silu).to(gate.dtype.element_ty)
    # Rounded as in Liger's forward kernel, so that the weight's gradient sees what the forward pass made.
    product = silu.to(gate.dtype.element_ty).to(tl.float32) * b
    tl.store(gradient + at, product.to(gate.dtype.element_ty), mask=real)
    tl.store(gate + at, d_gate, mask=real)
    tl.store(up + at, d_up, mask=real)
    if SUMS:
        at = below * width + columns
        tl.store(gate_sums + at, tl.sum(d_gate.to(tl.float32), axis=0), mask=columns < width)
        tl.store(up_sums + at, tl.sum(d_up.to(tl.float32), axis=0), mask=columns < width)
