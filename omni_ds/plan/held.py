"""Parameters of the LLM that one rank holds under pipeline, tensor and expert parallelism.

Heads, MLP channels and vocabulary rows are dealt over the tensor ranks as evenly as they go, larger shares
first, key-value heads copied where there are fewer of them than ranks; norms, routers and experts are on
every tensor rank. Experts are dealt over the expert ranks. The numbers are those of the first rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from omni_ds.plan.llm_meta import LLMMeta
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.tensor_rules import head_share


@dataclass(frozen=True)
class LayerShare:
    """Widths of a decoder layer on a tensor rank."""

    heads: int
    kv_heads: int
    query: int
    key: int
    inner: int

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, llm: LLMMeta, tensor: int) -> LayerShare:
        """Of the first tensor rank, which holds most (tensor_rules.head_share)."""
        held = head_share(llm.heads, llm.kv_heads, tensor, 0)
        heads, kv_heads = held.query[1] - held.query[0], held.kv[1] - held.kv[0]
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
    return _layer_held(llm, index in llm.moe_layers, tensor, expert)


@lru_cache(maxsize=1024)
def _layer_held(llm: LLMMeta, sparse: bool, tensor: int, expert: int) -> Held:
    share, hidden = LayerShare.of(llm, tensor), llm.hidden
    dense = hidden * (2 * share.query + 2 * share.key)
    dense += (share.query + 2 * share.key) * llm.qkv_bias + hidden * llm.out_bias
    dense += 2 * hidden + 2 * llm.head_dim * llm.qk_norm
    if sparse:
        experts = llm.expert_parameters_of_layer(llm.moe_layers[0]) // expert
        return Held(dense + llm.experts * hidden, experts)
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
