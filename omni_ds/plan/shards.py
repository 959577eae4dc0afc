"""How a packed sequence is cut over the sequence axis, and how its feature rows are dealt over the tensor
axis."""

from __future__ import annotations

from functools import lru_cache


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
