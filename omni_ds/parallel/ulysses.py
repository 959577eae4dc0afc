"""Ulysses sequence parallelism: shards of tokens with all heads become all tokens with a share of the heads,
and back (arXiv 2309.14509), for token and head counts that do not divide.

Query heads are dealt as evenly as they go, and a rank may get none. Each rank receives the key-value heads
that its query heads read, so a head that several ranks need is sent to each of them, and its gradients are
added where they return. Queries, keys and values travel in one message per pair of ranks.

Shapes: T tokens of the whole sequence, T_s of this rank's shard; A query heads, K key-value heads, D head
size; A_r and K_r those of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from omni_ds.plan.shards import even_bounds

Cut = tuple[int, int]  # first head and the one after the last


@dataclass(frozen=True)
class HeadPlan:
    """Which heads each rank computes.

    Attributes:
        queries: query heads of each rank; together all of them, in order.
        keys: key-value heads that each rank needs; those of neighbours may overlap.
        kv_of_head: for each rank, which of its key-value heads each of its query heads reads.
    """

    queries: tuple[Cut, ...]
    keys: tuple[Cut, ...]
    kv_of_head: tuple[tuple[int, ...], ...]


def grouped_heads(heads: int, kv_heads: int) -> tuple[int, ...]:
    """The key-value head that each query head reads in grouped-query attention: heads / kv_heads share
    one."""
    assert heads % kv_heads == 0, f"{heads} query heads do not divide over {kv_heads} key-value heads"
    return tuple(head // (heads // kv_heads) for head in range(heads))


@lru_cache(maxsize=1 << 10)
def head_plan(kv_of_head: tuple[int, ...], ranks: int) -> HeadPlan:
    """Deal the query heads over ``ranks``. kv_of_head: the key-value head of each query head, ascending."""
    assert all(a <= b for a, b in pairwise(kv_of_head)), "key-value heads of query heads must ascend"
    queries = tuple(pairwise(even_bounds(len(kv_of_head), ranks)))
    needed = [kv_of_head[first:end] for first, end in queries]
    keys = tuple((heads[0], heads[-1] + 1) if heads else (0, 0) for heads in needed)
    local = tuple(
        tuple(head - first for head in heads) for heads, (first, _) in zip(needed, keys, strict=True)
    )
    return HeadPlan(queries, keys, local)


@dataclass(frozen=True)
class HeadExchange:
    """Moves several tensors between [T_s, all heads, D] and [T, this rank's heads, D] of each.

    A message holds one row per token of the sender's shard, with the receiver's heads of every tensor side by
    side; so what arrives is the whole sequence in order, without a copy. :meth:`spread` and :meth:`collect`
    are each other's transpose.

    Attributes:
        bounds: token bounds of the shards.
        rank: this rank's place among them.
        heads: heads of each tensor.
        cuts: for each rank, the heads of each tensor that it needs.
    """

    bounds: tuple[int, ...]
    rank: int
    heads: tuple[int, ...]
    cuts: tuple[tuple[Cut, ...], ...]

    @property
    def tokens(self) -> int:
        return self.bounds[self.rank + 1] - self.bounds[self.rank]

    def _widths(self, rank: int, sizes: Sequence[int]) -> list[int]:
        """Elements of a row for ``rank``, tensor by tensor. sizes: the tensors' D."""
        return [(end - first) * size for (first, end), size in zip(self.cuts[rank], sizes, strict=True)]

    def shard_splits(self, sizes: Sequence[int]) -> list[int]:
        """Elements exchanged with each rank, counted at the rank that holds the shard."""
        return [self.tokens * sum(self._widths(rank, sizes)) for rank in range(len(self.cuts))]

    def whole_splits(self, sizes: Sequence[int]) -> list[int]:
        """Elements exchanged with each rank, counted at the rank that holds the heads."""
        width = sum(self._widths(self.rank, sizes))
        return [(end - first) * width for first, end in pairwise(self.bounds)]

    def pack_shard(self, tensors: Sequence[Tensor]) -> Tensor:
        """[T_s, heads, D] of each tensor -> flat messages, in the order of ranks."""
        sizes = [tensor.shape[-1] for tensor in tensors]
        splits = self.shard_splits(sizes)
        buffer = tensors[0].new_empty(sum(splits))
        for rank, message in enumerate(buffer.split(splits)):
            for (first, end), tensor, piece in zip(
                self.cuts[rank], tensors, self._columns(message, rank, self.tokens, sizes), strict=True
            ):
                piece.copy_(tensor[:, first:end])
        return buffer

    def unpack_shard(self, buffer: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """Flat messages -> [T_s, heads, D] of each tensor; a head that several ranks send is their sum."""
        messages = [
            self._columns(message, rank, self.tokens, sizes)
            for rank, message in enumerate(buffer.split(self.shard_splits(sizes)))
        ]
        return tuple(
            self._joined(number, pieces) for number, pieces in enumerate(zip(*messages, strict=True))
        )

    def _joined(self, number: int, pieces: Sequence[Tensor]) -> Tensor:
        """[T_s, heads, D] of a tensor from what each rank has of it."""
        cuts, heads = [cuts[number] for cuts in self.cuts], self.heads[number]
        bounds = [0, *(end for first, end in cuts if first < end)]
        if [first for first, end in cuts if first < end] == bounds[:-1] and bounds[-1] == heads:
            return torch.cat(tuple(pieces), dim=1)
        whole = pieces[0].new_zeros((self.tokens, heads, pieces[0].shape[2]))
        for (first, end), piece in zip(cuts, pieces, strict=True):
            whole[:, first:end] += piece
        return whole

    def pack_whole(self, tensors: Sequence[Tensor]) -> Tensor:
        """[T, this rank's heads, D] of each tensor -> flat messages, in the order of ranks."""
        rows = [tensor.flatten(1) for tensor in tensors]
        return (rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)).reshape(-1)

    def unpack_whole(self, buffer: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """Flat messages -> [T, this rank's heads, D] of each tensor, views of the buffer."""
        return self._columns(buffer, self.rank, self.bounds[-1], sizes)

    def _columns(self, message: Tensor, rank: int, tokens: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        widths = self._widths(rank, sizes)
        pieces = message.view(tokens, sum(widths)).split(widths, dim=1)
        return tuple(
            piece.view(tokens, end - first, size)
            for piece, (first, end), size in zip(pieces, self.cuts[rank], sizes, strict=True)
        )

    def spread(self, tensors: Sequence[Tensor], group: ProcessGroup) -> tuple[Tensor, ...]:
        """[T_s, heads, D] -> [T, this rank's heads, D] of each tensor. A collective of the group."""
        sizes = [tensor.shape[-1] for tensor in tensors]
        received = _all_to_all(
            self.pack_shard(tensors), self.shard_splits(sizes), self.whole_splits(sizes), group
        )
        return self.unpack_whole(received, sizes)

    def collect(self, tensors: Sequence[Tensor], group: ProcessGroup) -> tuple[Tensor, ...]:
        """[T, this rank's heads, D] -> [T_s, heads, D] of each tensor. A collective of the group."""
        sizes = [tensor.shape[-1] for tensor in tensors]
        received = _all_to_all(
            self.pack_whole(tensors), self.whole_splits(sizes), self.shard_splits(sizes), group
        )
        return self.unpack_shard(received, sizes)


def _all_to_all(buffer: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    received = buffer.new_empty(sum(receive))
    dist.all_to_all_single(received, buffer, receive, send, group=group)
    return received


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange: HeadExchange, group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.group = exchange, group
        return exchange.spread(tensors, group)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return None, None, *ctx.exchange.collect(gradients, ctx.group)


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange: HeadExchange, group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.group = exchange, group
        return exchange.collect(tensors, group)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return None, None, *ctx.exchange.spread(gradients, ctx.group)


@dataclass(frozen=True)
class Ulysses:
    """Redistribution around attention for one sequence cut over a group.

    Every rank of the group calls both methods for every attention, in the same order, and runs backward if
    any of them does: backward is a collective too.

    Attributes:
        group: the ranks that hold the shards.
        bounds: (0, ..., T): where each rank's tokens start, and the end.
    """

    group: ProcessGroup
    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        ranks = dist.get_world_size(self.group)
        assert len(self.bounds) == ranks + 1, f"{len(self.bounds) - 1} shards for a group of {ranks}"

    @property
    def ranks(self) -> int:
        return len(self.bounds) - 1

    def to_heads(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
        """All tokens of this rank's heads.

        The result has a graph on every rank whenever gradients are enabled, even where this rank's tokens
        need none (a frozen model, and the features fell into another shard): each of them has to take part in
        the collectives of backward.

        Args:
            query: [T_s, A, D]; key: [T_s, K, D]; value: [T_s, K, D_v]; A / K heads share one.

        Returns:
            query [T, A_r, D], key [T, K_r, D], value [T, K_r, D_v], and which of the K_r heads each of the
            A_r heads reads: a rank's share of the heads need not be even groups.
        """
        rank = dist.get_rank(self.group)
        plan = head_plan(grouped_heads(query.shape[1], key.shape[1]), self.ranks)
        cuts = tuple((q, k, k) for q, k in zip(plan.queries, plan.keys, strict=True))
        exchange = HeadExchange(self.bounds, rank, tuple(x.shape[1] for x in (query, key, value)), cuts)
        assert query.shape[0] == exchange.tokens, (
            f"{query.shape[0]} tokens where the shard has {exchange.tokens}"
        )
        if torch.is_grad_enabled() and not any(x.requires_grad for x in (query, key, value)):
            query = query.detach().requires_grad_()
        query, key, value = _Spread.apply(exchange, self.group, query, key, value)
        return query, key, value, plan.kv_of_head[rank]

    def to_tokens(self, out: Tensor, heads: int) -> Tensor:
        """All ``heads`` of this rank's tokens: [T, A_r, D_v] -> [T_s, A, D_v]."""
        cuts = tuple((cut,) for cut in pairwise(even_bounds(heads, self.ranks)))
        exchange = HeadExchange(self.bounds, dist.get_rank(self.group), (heads,), cuts)
        return _Collect.apply(exchange, self.group, out)[0]
