"""Which head of which token goes where, without processes: the messages are carried over by hand."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_ds.parallel.ulysses import HeadExchange, grouped_heads, head_plan
from omni_ds.plan.shards import even_bounds


@st.composite
def layouts(draw):
    """(key-value head of each query head, token bounds), any of the shards possibly empty."""
    ranks = draw(st.integers(1, 6))
    sharing = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    kv_of_head = tuple(kv for kv, count in enumerate(sharing) for _ in range(count))
    tokens = draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks))
    return kv_of_head, tuple(accumulate(tokens, initial=0))


def exchanges(kv_of_head: tuple[int, ...], bounds: tuple[int, ...]) -> list[HeadExchange]:
    ranks = len(bounds) - 1
    plan = head_plan(kv_of_head, ranks)
    heads = (len(kv_of_head), kv_of_head[-1] + 1, kv_of_head[-1] + 1)
    cuts = tuple((q, k, k) for q, k in zip(plan.queries, plan.keys, strict=True))
    return [HeadExchange(bounds, rank, heads, cuts) for rank in range(ranks)]


def labels(tokens: int, heads: int, size: int, base: int) -> torch.Tensor:
    """A different number for each element, exact in fp64."""
    return (base + torch.arange(tokens * heads * size, dtype=torch.float64)).view(tokens, heads, size)


def carry(buffers: list[torch.Tensor], send: list[list[int]], receive: list[list[int]]) -> list[torch.Tensor]:
    """all_to_all_single; what a rank expects from another is what that one sends."""
    assert [list(column) for column in zip(*send, strict=True)] == receive
    messages = [buffer.split(splits) for buffer, splits in zip(buffers, send, strict=True)]
    return [torch.cat([row[rank] for row in messages]) for rank in range(len(buffers))]


@given(layouts())
def test_every_head_is_dealt_once_with_the_keys_it_reads(layout) -> None:
    kv_of_head, bounds = layout
    plan = head_plan(kv_of_head, len(bounds) - 1)
    assert [head for first, end in plan.queries for head in range(first, end)] == list(range(len(kv_of_head)))
    assert max(b - a for a, b in plan.queries) - min(b - a for a, b in plan.queries) <= 1
    for (first, end), (key, key_end), local in zip(plan.queries, plan.keys, plan.kv_of_head, strict=True):
        assert tuple(key + kv for kv in local) == kv_of_head[first:end]
        assert set(range(key, key_end)) == set(kv_of_head[first:end]), "a key-value head nobody reads is sent"


@given(layouts())
def test_every_token_of_every_head_arrives_once_where_it_is_needed(layout) -> None:
    kv_of_head, bounds = layout
    ranks, sizes = exchanges(kv_of_head, bounds), (3, 3, 2)
    whole = [
        labels(bounds[-1], heads, size, 10**6 * i)
        for i, (heads, size) in enumerate(zip(ranks[0].heads, sizes, strict=True))
    ]
    shards = [[x[first:end] for x in whole] for first, end in pairwise(bounds)]
    shard_splits = [r.shard_splits(sizes) for r in ranks]
    whole_splits = [r.whole_splits(sizes) for r in ranks]

    sent = [r.pack_shard(tensors) for r, tensors in zip(ranks, shards, strict=True)]
    arrived = carry(sent, shard_splits, whole_splits)
    mine = [r.unpack_whole(buffer, sizes) for r, buffer in zip(ranks, arrived, strict=True)]
    for r, tensors in zip(ranks, mine, strict=True):
        for x, (first, end), got in zip(whole, r.cuts[r.rank], tensors, strict=True):
            assert torch.equal(got, x[:, first:end])

    returned = [r.pack_whole(tensors) for r, tensors in zip(ranks, mine, strict=True)]
    back = carry(returned, whole_splits, shard_splits)
    for r, buffer, tensors in zip(ranks, back, shards, strict=True):
        for i, (x, got) in enumerate(zip(tensors, r.unpack_shard(buffer, sizes), strict=True)):
            for head in range(x.shape[1]):
                holders = sum(cut[i][0] <= head < cut[i][1] for cut in r.cuts)
                assert torch.equal(got[:, head], holders * x[:, head])
                assert holders == 1 or i > 0


def test_heads_that_do_not_divide() -> None:
    assert grouped_heads(6, 3) == (0, 0, 1, 1, 2, 2)
    plan = head_plan(grouped_heads(6, 3), 2)
    assert plan.keys == ((0, 2), (1, 3)) and plan.kv_of_head == ((0, 0, 1), (0, 1, 1))
    assert head_plan((0, 0), 4).keys == ((0, 1), (0, 1), (0, 0), (0, 0))
    assert head_plan((0, 0), 4).kv_of_head == ((0,), (0,), (), ())
    with pytest.raises(AssertionError, match="ascend"):
        head_plan((1, 0), 2)
    with pytest.raises(AssertionError, match="3 query heads"):
        grouped_heads(3, 2)


def test_neighbours_exchange_only_what_is_read() -> None:
    """Four query heads of two key-value heads on two ranks: no key travels twice."""
    ranks = exchanges(grouped_heads(4, 2), even_bounds(7, 2))
    assert ranks[0].shard_splits((1, 1, 1)) == [16, 16]  # 4 tokens of 2 + 1 + 1 heads
    assert ranks[1].whole_splits((1, 1, 1)) == [16, 12]
