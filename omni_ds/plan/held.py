"""Parameters of the LLM that one rank holds under pipeline, tensor and expert parallelism.

Heads, MLP channels and vocabulary rows are dealt over the tensor ranks as evenly as they go, larger shares
first, key-value heads copied where there are fewer of them than ranks; norms, routers and experts are on
every tensor rank. Experts are dealt over the expert ranks. The numbers are those of the first rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omni_ds.plan.llm_meta import LLMMeta
from omni_ds.plan.mesh import Mesh


@dataclass(frozen=True)
class Experts:
    """Sizes of the mixture-of-experts layers; layers: their indices, none in a dense model."""

    count: int = 0
    per_token: int = 0
    intermediate: int = 0
    layers: tuple[int, ...] = ()


def experts_of(llm: LLMMeta) -> Experts:
    """The one place that reads a model's experts."""
    return Experts()


@dataclass(frozen=True)
class LayerShare:
    """Widths of a decoder layer on a tensor rank."""

    heads: int
    kv_heads: int
    query: int
    key: int
    inner: int

    @classmethod
    def of(cls, llm: LLMMeta, tensor: int) -> LayerShare:
        """Of the first tensor rank. Query heads stay with their key-value head; with fewer of these than
        ranks, the query heads of one are dealt over its copies."""
        per_head = llm.heads // llm.kv_heads
        if llm.kv_heads >= tensor:
            kv_heads = -(-llm.kv_heads // tensor)
            heads = kv_heads * per_head
        else:
            copies = sum(rank * llm.kv_heads // tensor == 0 for rank in range(tensor))
            kv_heads, heads = 1, -(-per_head // copies)
        inner = -(-llm.intermediate // tensor)
        return cls(heads, kv_heads, heads * llm.head_dim, kv_heads * llm.head_dim, inner)


@dataclass(frozen=True)
class Held:
    """Parameters on a rank: those whose ZeRO group is data x sequence, and experts."""

    dense: int
    experts: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.experts


def layer_held(llm: LLMMeta, index: int, tensor: int, expert: int) -> Held:
    """Of decoder layer `index`."""
    share, hidden, experts = LayerShare.of(llm, tensor), llm.hidden, experts_of(llm)
    dense = hidden * (2 * share.query + 2 * share.key)
    dense += (share.query + 2 * share.key) * llm.qkv_bias + hidden * llm.out_bias
    dense += 2 * hidden + 2 * llm.head_dim * llm.qk_norm
    if index in experts.layers:
        held = -(-experts.count // expert)
        return Held(dense + experts.count * hidden, held * 3 * hidden * experts.intermediate)
    return Held(dense + 3 * hidden * share.inner + (2 * share.inner + hidden) * llm.mlp_bias)


def held_by_stage(llm: LLMMeta, mesh: Mesh, stages: Sequence[tuple[int, int]], stage: int) -> Held:
    """Of a rank of `stage`: its layers, on the first stage the embedding, on the last one norm and head. A
    tied matrix is held by both, once if they are one."""
    layers = [layer_held(llm, i, mesh.tensor, mesh.expert) for i in range(*stages[stage])]
    vocabulary = -(-llm.vocab // mesh.tensor) * llm.hidden
    dense, last = sum(layer.dense for layer in layers), len(stages) - 1
    if stage == 0:
        dense += vocabulary
    if stage == last:
        dense += llm.hidden + (0 if llm.tied and last == 0 else vocabulary)
    return Held(dense, sum(layer.experts for layer in layers))
