"""Mixture-of-experts blocks of a decoder layer: which block is built, what its router says, what that costs.

The auxiliary losses are per document and layer and weighted by tokens, so that they do not depend on how
documents are packed, cut over ranks or spread over stages; HF's own, over a whole batch and all layers
at once, does. For one document and one layer it is HF's ``load_balancing_loss_func``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig

from models.documents import Documents
from models.packed import PackedBatch
from omni_ds.parallel.expert import build_expert_layer
from omni_ds.parallel.layer_groups import LayerGroups, degree, even_part, index
from omni_ds.parallel.sums import sum_output
from omni_ds.plan.llm_meta import check_expert_degree, moe_layer_indices
from omni_ds.plan.region import Region

_ALIGNMENT = 8  # torch._grouped_mm wants rows of a multiple of 16 bytes, bf16 included


def expert_width(config: PreTrainedConfig) -> int:
    """Intermediate size of one expert."""
    return config.intermediate_size if config.model_type == "mixtral" else config.moe_intermediate_size


def grouped_matmul(config: PreTrainedConfig) -> bool:
    """Whether torch's grouped matrix product takes the sizes of a config's experts."""
    return config.hidden_size % _ALIGNMENT == 0 and expert_width(config) % _ALIGNMENT == 0


def configure_experts(config: PreTrainedConfig) -> None:
    """Settings of HF's own blocks, in place: their products, and no noise (it would depend on the packing).

    A config without experts is left as it is.
    """
    if moe_layer_indices(config.to_dict()):
        config._experts_implementation = "grouped_mm" if grouped_matmul(config) else "eager"
        config.router_jitter_noise = 0.0


@dataclass(frozen=True)
class RouterPenalty:
    """What the routers of a model are taught beside the loss.

    Attributes:
        experts, top_k: of a layer.
        balance, z: coefficients of the load-balancing loss and of the z-loss in one layer: the model's,
            divided by the number of its MoE layers. 0: none.
    """

    experts: int
    top_k: int
    balance: float
    z: float

    @classmethod
    def of(cls, config: PreTrainedConfig) -> RouterPenalty:
        """As the config says, in HF's terms.

        ``router_aux_loss_coef`` counts only with ``output_router_logits: true``: that is HF's switch for
        the loss, it is off by default and in the files of the hub, and tools for fine-tuning ask for it
        explicitly. ``router_z_loss_coef`` is on wherever the config has it; neither family does by itself.
        """
        layers = len(moe_layer_indices(config.to_dict()))
        balance = config.router_aux_loss_coef if config.output_router_logits else 0.0
        z = getattr(config, "router_z_loss_coef", None) or 0.0
        experts = getattr(config, "num_local_experts", None) or config.num_experts
        return cls(experts, config.num_experts_per_tok, balance / layers, z / layers)


class MoEBlock:
    """The sparse block of one decoder layer, HF's or the expert-parallel one: not a module, a view of it."""

    def __init__(self, config: PreTrainedConfig, number: int, groups: LayerGroups):
        self.number, self.groups, self.penalty = number, groups, RouterPenalty.of(config)
        self.width, self.hidden = expert_width(config), config.hidden_size
        self.parallel = degree(groups.expert) > 1

    def hf_names(self) -> dict[str, str]:
        """Names below ``mlp.`` -> global names, of the expert-parallel block. w1 (gate) and w3 (up) are
        halves of HF's ``gate_up_proj``."""
        mlp = f"llm.model.layers.{self.number}.mlp."
        return {
            "router.gate.weight": mlp + "gate.weight",
            "experts.w1": mlp + "experts.gate_up_proj",
            "experts.w3": mlp + "experts.gate_up_proj",
            "experts.w2": mlp + "experts.down_proj",
        }

    def regions(self) -> dict[str, Region]:
        """Names below ``mlp.`` -> the part of the whole that this rank holds."""
        first, last = even_part(self.penalty.experts, self.groups.expert)
        both = (self.penalty.experts, 2 * self.width, self.hidden)
        down = (self.penalty.experts, self.hidden, self.width)
        return {
            "experts.w1": Region.of(both, 1, 0, self.width).within(0, first, last),
            "experts.w3": Region.of(both, 1, self.width, 2 * self.width).within(0, first, last),
            "experts.w2": Region.of(down, 0, first, last),
        }

    @contextmanager
    def logits(self, mlp: nn.Module) -> Iterator[list[Tensor]]:
        """Collects the router's logits [T, E] of the forward inside.

        They come from the gate in either block; a hook for the time of one forward leaves nothing behind
        on the module (a recomputed forward may be cut off in the middle).
        """
        found: list[Tensor] = []
        gate = mlp.router.gate if self.parallel else mlp.gate
        hook = gate.register_forward_hook(
            lambda _module, _inputs, output: found.append(output if self.parallel else output[0])
        )
        try:
            yield found
        finally:
            hook.remove()

    def observe(self, logits: Tensor, batch: PackedBatch) -> tuple[Tensor | None, Tensor]:
        """(auxiliary loss, expert counts) of :func:`router_losses` for a micro-batch or its shard."""
        return router_losses(logits, batch.documents(self.groups.sequence), self.penalty)


def build_moe(
    config: PreTrainedConfig, number: int, block: nn.Module, groups: LayerGroups
) -> tuple[MoEBlock, nn.Module]:
    """The view and the block of layer ``number``: HF's own, or DeepSpeed's with this rank's experts.

    ``block``: HF's, on the meta device where ``groups.expert`` has several ranks; experts of other ranks
    then never get memory. Raises UserError when the degree does not divide the experts.
    """
    moe = MoEBlock(config, number, groups)
    if not moe.parallel:
        return moe, block
    check_expert_degree(moe.penalty.experts, degree(groups.expert))
    # On the CPU the fused kernels that DeepSpeed picks beside the grouped product may be missing.
    grouped = torch.cuda.is_available() and grouped_matmul(config)
    return moe, build_expert_layer(block, config, groups, grouped)


def router_losses(
    logits: Tensor, documents: Documents, penalty: RouterPenalty
) -> tuple[Tensor | None, Tensor]:
    """What one layer's router adds to the loss of a micro-batch, and how it spread the tokens.

    For document d of n tokens: ``balance * n * E * sum_e f_e P_e + z * sum_t logsumexp(logits_t)^2``, f_e the
    choices of expert e divided by n (they sum to top_k), P_e the mean of its probabilities: Switch
    Transformer (arXiv 2101.03961, eq. 4-6) as in HF's ``load_balancing_loss_func``, and ST-MoE (arXiv
    2202.08906, eq. 5). Sums over documents, not divided by the tokens of the batch.

    Args:
        logits: [T, E] of this shard, any float dtype; probabilities are fp32.
        documents: where they belong. With several shards this is a collective over them.
        penalty: coefficients.

    Returns:
        fp32 scalar, None without coefficients; its gradient is that of the whole documents for the tokens of
        this shard, its value counts on the first shard (the z-loss on each), so that a sum over shards is
        right. And [E] int64, detached: choices of each expert by the tokens of this shard that count.
    """
    probabilities = logits.float().softmax(-1) if penalty.balance else logits
    chosen = probabilities.detach().topk(penalty.top_k, dim=-1).indices
    total, experts = documents.lengths.shape[0], penalty.experts
    flat = (documents.index.unsqueeze(1) * experts + chosen).flatten()
    choices = torch.zeros(total * experts, device=logits.device)
    choices.scatter_add_(0, flat, torch.ones_like(flat, dtype=choices.dtype))
    choices = choices.view(total, experts)
    counts = (choices * documents.counted.unsqueeze(1)).sum(0).long()
    losses = []
    if penalty.balance:
        sums = probabilities.new_zeros(total, experts).index_add(0, documents.index, probabilities)
        first = True
        if degree(documents.sequence) > 1:
            sums = sum_output(sums, documents.sequence)
            dist.all_reduce(choices, group=documents.sequence)
            first = index(documents.sequence) == 0
        per_document = (choices * sums).sum(1) / documents.lengths.clamp(min=1.0)
        balance = penalty.balance * experts * (per_document * documents.counted).sum()
        losses.append(balance if first else balance - balance.detach())
    if penalty.z:
        weight = documents.counted[documents.index]
        losses.append(penalty.z * (logits.float().logsumexp(-1).square() * weight).sum())
    return (torch.stack(losses).sum() if losses else None), counts


def expert_load(counts: Sequence[Tensor]) -> float:
    """The ``expert_load`` metric: tokens of the busiest expert divided by the mean, in the worst layer.

    Args:
        counts: [E] choices of each expert, one tensor a MoE layer, summed over all ranks of the data axis.
    """
    loads = [float(count.max()) / max(float(count.float().mean()), 1e-9) for count in counts]
    return max(loads, default=1.0)
