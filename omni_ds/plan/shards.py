"""How a packed sequence is cut over the sequence axis, and how its feature rows are dealt over the tensor
axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise


def even_bounds(total: int, parts: int) -> tuple[int, ...]:
    """(0, ..., total): starts of `parts` ranges that differ by at most one, larger ones first; and the
    end."""
    base, more = divmod(total, parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + base + (part < more))
    return tuple(bounds)


def padding_tokens(tokens: int, sequence: int, collective: bool) -> int:
    """Tokens that stand for nothing, appended to a packed micro-batch of `tokens`.

    Every sequence-parallel rank needs a token of a micro-batch that has any. collective: the forward pass is
    a collective of several replicas (experts, ZeRO-3), so that one without samples takes part in it.
    """
    needed = sequence if tokens or collective else 0
    return max(0, needed - tokens)


@lru_cache(maxsize=1 << 14)
def sequence_bounds(tokens: int, sequence: int, collective: bool) -> tuple[int, ...]:
    """Where each sequence shard of a packed micro-batch starts, and where the last one ends; padding
    included."""
    return even_bounds(tokens + padding_tokens(tokens, sequence, collective), sequence)


def deal_rows(
    spans: Sequence[tuple[int, int]], bounds: Sequence[int], tensor: int
) -> tuple[tuple[int, int, int], ...]:
    """Which lane of the first stage receives which feature rows of a packed micro-batch.

    spans: (token, length) of its placeholders by rising token; bounds: of its sequence shards. A row goes to
    the shard that holds its token; the rows of a shard are dealt evenly over its `tensor` ranks, in order of
    tokens, because one all-reduce of the embedding brings them together anyway. Returns (start, stop, lane)
    of runs of tokens, lane = shard * tensor + tensor rank.
    """
    runs = []
    for shard, (low, high) in enumerate(pairwise(bounds)):
        inside = [(max(at, low), min(at + n, high)) for at, n in spans if at < high and at + n > low]
        cuts = even_bounds(sum(stop - start for start, stop in inside), tensor)
        t = done = 0
        for start, stop in inside:
            while start < stop:
                while done >= cuts[t + 1]:
                    t += 1
                taken = min(stop - start, cuts[t + 1] - done)
                runs.append((start, start + taken, shard * tensor + t))
                start, done = start + taken, done + taken
    return tuple(runs)


def rows_inside(spans: Iterable[tuple[int, int]], start: int, stop: int) -> int:
    """Feature rows of placeholders (token, length) that stand in tokens [start, stop)."""
    return sum(max(0, min(at + length, stop) - max(at, start)) for at, length in spans)
