"""Tokens that see each other in both directions: by a mask, and by two calls of a kernel without masks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data.dataset import EncodedSample
from data.pack import pack_samples
from models import spans
from models.attention import BACKENDS, omni_attention, select_backend
from models.masks import MaskSpec, Packing
from omni_ds.plan.sample import Item, SampleMeta

SEGMENTS = (9, 23, 1, 8)
# at a start, two in one segment side by side, over a whole segment, up to an end
SPANS = ((0, 4), (12, 6), (18, 5), (33, 8))


def allowed(window: int | None) -> Tensor:
    """[T, T] by the definition: the same segment, not behind the window, and not ahead but for the span."""
    segment = torch.repeat_interleave(torch.arange(len(SEGMENTS)), torch.tensor(SEGMENTS))
    span = torch.full((sum(SEGMENTS),), -1)
    for number, (first, length) in enumerate(SPANS):
        span[first : first + length] = number
    at = torch.arange(sum(SEGMENTS))
    query, key = at.unsqueeze(1), at.unsqueeze(0)
    together = (span.unsqueeze(1) == span) & (span >= 0)
    seen = (segment.unsqueeze(1) == segment) & ((key <= query) | together)
    return seen if window is None else seen & (query - key < window)


def dense(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """[Q, A, D], [P, K, D] -> [Q, A, D], scale 0.3."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    scores = 0.3 * torch.einsum("qad,pad->aqp", query, key)
    return torch.einsum("aqp,pad->qad", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def kernel(query: Tensor, key: Tensor, value: Tensor, call: spans.Call) -> Tensor:
    """What FlashAttention's varlen functions say they compute, one sequence at a time."""
    queries, keys = call.cu_queries.tolist(), call.cu_keys.tolist()
    assert call.longest_query == max(np.diff(queries)) and call.longest_key == max(np.diff(keys))
    pieces = []
    for a, b, c, d in zip(queries, queries[1:], keys, keys[1:], strict=False):
        distance = torch.arange(d - c) - torch.arange(b - a).unsqueeze(1) - (d - c) + (b - a)
        left, right = call.window
        seen = (torch.ones_like(distance) > 0) if left < 0 else distance >= -left
        seen &= (torch.ones_like(distance) > 0) if right < 0 else distance <= right
        pieces.append(dense(query[a:b], key[c:d], value[c:d], seen))
    return torch.cat(pieces)


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    heads = (4, 2, 2)
    return [torch.randn(sum(SEGMENTS), n, 8, dtype=torch.float64, requires_grad=True) for n in heads]


@pytest.mark.parametrize("window", [None, 3, 7])
@pytest.mark.parametrize("way", ["mask", "calls"])
def test_spans_are_the_definition(way: str, window: int | None) -> None:
    packing = Packing.of(SEGMENTS, "cpu", MaskSpec(causal=True, window=window, spans=SPANS))
    ours, theirs = inputs(), inputs()
    if way == "mask":
        heads = (x.transpose(0, 1).unsqueeze(0) for x in ours)
        out = omni_attention(nn.Module(), *heads, packing, scaling=0.3)[0][0]
    else:
        out = spans.attend(kernel, *ours, packing)
    expected = dense(*theirs, allowed(window))
    torch.testing.assert_close(out, expected)
    gradient = torch.randn_like(expected)
    out.backward(gradient)
    expected.backward(gradient)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_spans_of_another_batch_are_not_taken_from_the_first() -> None:
    packing = Packing.of(SEGMENTS, "cpu", MaskSpec(causal=True, spans=SPANS))
    (group, *_), _ = packing.groups
    without = packing.with_mask(replace(packing.mask, spans=SPANS[:1]))
    assert not torch.equal(spans.visible(packing, group), spans.visible(without, group))


def test_every_back_end_of_a_gpu_takes_spans_and_windows() -> None:
    mask = MaskSpec(causal=True, window=4, spans=SPANS)
    assert all(mask.features <= backend.features for backend in BACKENDS)
    assert select_backend(torch.device("cpu"), torch.float32, 8, mask).name == "sdpa"


def test_runs_of_feature_rows_are_spans_where_a_family_says_so() -> None:
    def sample(row: int, tokens: int, *at: tuple[int, int]) -> EncodedSample:
        items = tuple(
            Item(row, i, "vision", (8, 8), (4,), n, ((first, n),)) for i, (first, n) in enumerate(at)
        )
        ids = np.zeros(tokens, dtype=np.int64)
        return EncodedSample(ids, ids, SampleMeta(row, tokens, tokens, items), np.arange(tokens))

    # an image ends the first sample and one begins the next; two side by side are one run
    samples = [sample(0, 12, (1, 4), (8, 4)), sample(1, 10, (0, 4), (4, 4)), sample(2, 3)]
    packed = pack_samples(samples, (0, 12, 22, 25), blocks=True)
    assert packed.spans == ((1, 4), (8, 4), (12, 8))
    assert pack_samples(samples, (0, 12, 22, 25)).spans == ()
