"""The Triton kernels of models/window_attention.py: one program for a head of a window.

Pointers are to queries, keys, values and their gradients [T, A * D], rows ``stride`` numbers apart, to the
output and its gradient, rows ``out_stride`` apart, and to angles [T, D] fp32. HEADS: A; HALF: D / 2; COLUMNS
and TOKENS: HALF and the longest window rounded up to powers of two, at least 16.
"""

import triton
import triton.language as tl


@triton.jit
def _halves(start, at, real, HALF: tl.constexpr):
    """The two halves of a head's rows."""
    return tl.load(start + at, mask=real, other=0.0), tl.load(start + at + HALF, mask=real, other=0.0)


@triton.jit
def _turned(first, second, cos, sin):
    """Rows turned by their angles, in their own dtype; by the angles' opposites with -sin."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)


@triton.jit
def _weights(q1, q2, k1, k2, keys, length, scale):
    """[queries, keys]: the softmax of a window's scores."""
    scores = (tl.dot(q1, tl.trans(k1)) + tl.dot(q2, tl.trans(k2))) * scale
    scores = tl.where(keys[None, :] < length, scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    return weights / tl.sum(weights, axis=1)[:, None]


@triton.jit
def _window(
    cu_seqlens, cos_of, sin_of, query, key, stride, out_stride,
    HEADS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Of this program's head and window: its tokens and how many are real, which numbers are, where the first
    halves of its rows stand in the inputs and in the output, its angles, queries and keys."""
    window, head = tl.program_id(0) // HEADS, (tl.program_id(0) % HEADS) * 2 * HALF
    start = tl.load(cu_seqlens + window).to(tl.int64)
    length = tl.load(cu_seqlens + window + 1) - start
    tokens, columns = tl.arange(0, TOKENS), tl.arange(0, COLUMNS)
    real = (tokens < length)[:, None] & (columns < HALF)[None, :]
    rows = (start + tokens)[:, None]
    angles = rows * 2 * HALF + columns[None, :]
    at, at_out = rows * stride + head + columns[None, :], rows * out_stride + head + columns[None, :]

    cos, sin = tl.load(cos_of + angles, mask=real, other=0.0), tl.load(sin_of + angles, mask=real, other=0.0)
    q1, q2 = _halves(query, at, real, HALF)
    k1, k2 = _halves(key, at, real, HALF)
    return tokens, length, real, at, at_out, cos, sin, q1, q2, k1, k2


@triton.jit
def forward(
    cu_seqlens, cos_of, sin_of, query, key, value, out, stride, out_stride,
    scale, HEADS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tokens, length, real, at, at_out, cos, sin, q1, q2, k1, k2 = _window(
        cu_seqlens, cos_of, sin_of, query, key, stride, out_stride, HEADS, HALF, COLUMNS, TOKENS
    )
    v1, v2 = _halves(value, at, real, HALF)
    q1, q2 = _turned(q1, q2, cos, sin)
    k1, k2 = _turned(k1, k2, cos, sin)
    weights = _weights(q1, q2, k1, k2, tokens, length, scale).to(v1.dtype)
    tl.store(out + at_out, tl.dot(weights, v1).to(v1.dtype), mask=real)
    tl.store(out + at_out + HALF, tl.dot(weights, v2).to(v1.dtype), mask=real)


@triton.jit
def backward(
    cu_seqlens, cos_of, sin_of, query, key, value, gradient, d_query, d_key, d_value, stride, out_stride,
    scale, HEADS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tokens, length, real, at, at_out, cos, sin, q1, q2, k1, k2 = _window(
        cu_seqlens, cos_of, sin_of, query, key, stride, out_stride, HEADS, HALF, COLUMNS, TOKENS
    )
    q1, q2 = _turned(q1, q2, cos, sin)
    k1, k2 = _turned(k1, k2, cos, sin)
    weights = _weights(q1, q2, k1, k2, tokens, length, scale)

    # Rows behind the window have gradients of zero, so their queries and weights do not count.
    g1, g2 = _halves(gradient, at_out, real, HALF)
    rounded = tl.trans(weights.to(g1.dtype))
    tl.store(d_value + at, tl.dot(rounded, g1).to(g1.dtype), mask=real)
    tl.store(d_value + at + HALF, tl.dot(rounded, g2).to(g1.dtype), mask=real)

    v1, v2 = _halves(value, at, real, HALF)
    d_weights = tl.dot(g1, tl.trans(v1)) + tl.dot(g2, tl.trans(v2))
    inner = tl.sum(weights * d_weights, axis=1)
    d_scores = (weights * (d_weights - inner[:, None]) * scale).to(q1.dtype)
    d1, d2 = _turned(tl.dot(d_scores, k1), tl.dot(d_scores, k2), cos, -sin)
    tl.store(d_query + at, d1.to(q1.dtype), mask=real)
    tl.store(d_query + at + HALF, d2.to(q1.dtype), mask=real)
    d_scores = tl.trans(d_scores)
    d1, d2 = _turned(tl.dot(d_scores, q1), tl.dot(d_scores, q2), cos, -sin)
    tl.store(d_key + at, d1.to(q1.dtype), mask=real)
    tl.store(d_key + at + HALF, d2.to(q1.dtype), mask=real)
