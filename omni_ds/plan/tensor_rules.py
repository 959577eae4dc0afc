"""How tensor parallelism cuts an LLM: by whole heads, intermediate channels and vocabulary rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omni_ds.errors import UserError
from omni_ds.plan.shards import even_bounds

COLUMN, ROW, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
# What a Llama-shaped layer needs; HF's plans leave some of it out (Qwen3-VL's text plan has none of it).
_STYLES = {
    "self_attn.q_proj": COLUMN,
    "self_attn.k_proj": COLUMN,
    "self_attn.v_proj": COLUMN,
    "self_attn.o_proj": ROW,
    "self_attn.q_norm": SUMMED,
    "self_attn.k_norm": SUMMED,
    "mlp.gate_proj": COLUMN,
    "mlp.up_proj": COLUMN,
    "mlp.down_proj": ROW,
}
_LAYER = "layers.*."


@dataclass(frozen=True)
class TensorSizes:
    """What of an LLM is cut, and so bounds the degree."""

    heads: int
    kv_heads: int
    intermediate: int
    vocab: int


@dataclass(frozen=True)
class HeadShare:
    """Heads of one tensor rank.

    Attributes:
        query: first query head, and the end.
        kv: first key-value head, and the end.
        copies: tensor ranks that hold these key-value heads; above 1 there is one such head, and its
            gradient is summed over them.
        first: the first of them, which counts the head in norms.
    """

    query: tuple[int, int]
    kv: tuple[int, int]
    copies: int = 1
    first: bool = True


def head_share(heads: int, kv_heads: int, degree: int, index: int) -> HeadShare:
    """The heads of tensor rank ``index`` of ``degree``; query heads stay with their key-value head.

    With as many key-value heads as ranks, or more, they are dealt in order, one more to the first ranks where
    they do not divide. With fewer, rank r serves head ``r * kv_heads // degree`` as a copy, and its query
    heads are dealt over the copies.
    """
    size = heads // kv_heads
    if kv_heads >= degree:
        bounds = even_bounds(kv_heads, degree)
        start, stop = bounds[index], bounds[index + 1]
        return HeadShare((start * size, stop * size), (start, stop))
    head = index * kv_heads // degree
    ranks = [rank for rank in range(degree) if rank * kv_heads // degree == head]
    place, dealt = ranks.index(index), even_bounds(size, len(ranks))
    query = (head * size + dealt[place], head * size + dealt[place + 1])
    return HeadShare(query, (head, head + 1), len(ranks), place == 0)


def largest_tensor_degree(sizes: TensorSizes) -> int:
    """Every degree up to this one works: each rank has a query head, a channel and a vocabulary row."""
    return min(sizes.heads, sizes.intermediate, sizes.vocab)


def check_tensor_degree(sizes: TensorSizes, degree: int, where: str = "tensor_parallel.autotp_size") -> None:
    """UserError when ``degree`` tensor ranks cannot share this LLM, naming the nearest degree that can."""
    if degree == 1:
        return
    if sizes.heads % sizes.kv_heads:
        raise UserError(
            f"{where}: {sizes.heads} attention heads are not a multiple of {sizes.kv_heads} key-value heads, "
            f"so they cannot be cut; use 1"
        )
    limits = {
        "attention heads": sizes.heads,
        "intermediate channels": sizes.intermediate,
        "vocabulary rows": sizes.vocab,
    }
    short = [f"{size} {name}" for name, size in limits.items() if size < degree]
    if short:
        raise UserError(
            f"{where}: {degree} ranks cannot share {', '.join(short)}; every rank needs one. The nearest "
            f"degree that works is {largest_tensor_degree(sizes)}"
        )


def layer_styles(hf_plan: Mapping[str, str] | None) -> dict[str, str]:
    """Style of each module of a decoder layer, by its name in the layer: HF's ``base_model_tp_plan``,
    completed.

    Styles of fused experts are left out: tensor ranks compute routers and experts redundantly.
    """
    given = {
        name.removeprefix(_LAYER): style
        for name, style in (hf_plan or {}).items()
        if name.startswith(_LAYER) and ".experts" not in name
    }
    return _STYLES | given
