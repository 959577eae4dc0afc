"""A Mixtral or Qwen3-MoE as HF computes it, one document at a time, and as our layers hold it on a rank."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from models.init import assign, empty_parameters
from models.llm import build_llm_layers
from models.packed import PackedBatch, StageState
from models.parameters import HeldParameter, held_parameters
from omni_ds.parallel.expert import is_expert
from omni_ds.parallel.layer_groups import LayerGroups
from omni_ds.plan.mesh import Mesh
from tests.unit.model_helpers import llm_config, packed_batch

LENGTHS = ((9, 5, 1), (7,), (3, 4), (12, 2))  # documents of each data rank
BALANCE, Z = 0.2, 0.05
CASES = {
    "mixtral": {"num_local_experts": 4, "router_aux_loss_coef": BALANCE},
    "qwen3-moe-mixed": {"router_aux_loss_coef": BALANCE, "router_z_loss_coef": Z, "num_hidden_layers": 3},
}


def moe_config(name: str, penalty: bool = True, **changes: object) -> PreTrainedConfig:
    settings = {"output_router_logits": penalty} | CASES[name] | changes
    if not penalty:
        settings.pop("router_z_loss_coef", None)
    return AutoConfig.for_model(**llm_config(name, **settings))


def hf_model(config: PreTrainedConfig) -> nn.Module:
    """HF's causal LM; routers are made decisive, biases and norms are not the ones of a fresh model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (1.0 if ".gate.weight" in name else 0.1))
    return model


def hf_penalty(config: PreTrainedConfig, router_logits: Sequence[Tensor]) -> Tensor:
    """Our definition by HF's function, for one document: logits [n, E] of every MoE layer."""
    module = sys.modules[AutoModelForCausalLM._model_mapping[type(config)].__module__]
    total = torch.zeros(())
    z = getattr(config, "router_z_loss_coef", 0.0) or 0.0
    for logits in router_logits:
        aux = module.load_balancing_loss_func((logits,), config.num_local_experts, config.num_experts_per_tok)
        if config.output_router_logits:
            total = total + len(logits) * config.router_aux_loss_coef * aux
        total = total + len(logits) * z * logits.float().logsumexp(-1).square().mean()
    return total / len(router_logits)


def hf_loss(model: nn.Module, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """(summed cross-entropy, summed router losses), each document alone."""
    loss, penalty, start = torch.zeros(()), torch.zeros(()), 0
    for length in batch.segments:
        ids = batch.input_ids[start : start + length]
        out = model(input_ids=ids[None], use_cache=False, output_router_logits=True)
        loss = loss + F.cross_entropy(out.logits[0, :-1].float(), ids[1:], reduction="sum")
        penalty = penalty + hf_penalty(model.config, out.router_logits)
        start += length
    return loss, penalty


class Sharded(nn.Module):
    """Our layers of one rank without a head: the loss is taken through HF's head, frozen."""

    def __init__(self, reference: nn.Module, groups: LayerGroups, recompute: bool = False):
        super().__init__()
        with empty_parameters():
            built = build_llm_layers(reference.config, recompute=recompute, groups=groups)[:-1]
            self.layers = nn.ModuleList([definition.build() for definition in built])
        whole = {f"llm.{name}": value.detach() for name, value in reference.named_parameters()}
        for layer in self.layers:
            regions = layer.regions() if hasattr(layer, "regions") else {}
            for local, name in layer.hf_names().items():
                value = whole[name]
                assign(layer, local, value[regions[local].index] if local in regions else value)
        self.register_buffer("head", whole["llm.lm_head.weight"].clone())

    def held(self) -> list[HeldParameter]:
        return held_parameters(self.layers)

    def forward(self, batch: PackedBatch) -> tuple[Tensor, StageState]:
        """(summed cross-entropy + router losses, the state after the last layer)."""
        state = StageState(batch)
        for layer in self.layers:
            state = layer(state)
        logits = F.linear(state.hidden, self.head.to(state.hidden.dtype)).float()
        loss = F.cross_entropy(logits, batch.target_ids, reduction="sum")
        return loss if state.auxiliary is None else loss + state.auxiliary, state


def batches(world: int, seed: int = 0) -> list[PackedBatch]:
    return [packed_batch(LENGTHS[rank], vocab=61, seed=seed * 10 + rank) for rank in range(world)]


def expert_groups(world: int, expert: int, sequence: int = 1) -> LayerGroups:
    mesh = Mesh(pipe=1, data=world // sequence, sequence=sequence, expert=expert)
    return LayerGroups.create(mesh, kv_heads=2, timeout=timedelta(seconds=60))


def summed_gradient(held: HeldParameter, groups: LayerGroups) -> Tensor:
    """Sum over the ranks that hold the same part."""
    gradient = torch.zeros_like(held.parameter) if held.parameter.grad is None else held.parameter.grad
    dist.all_reduce(gradient, group=groups.expert_data if is_expert(held.parameter) else None)
    return gradient


def assert_close(ours: Tensor, expected: Tensor, name: str, bound: float = 1e-5) -> float:
    """Largest difference relative to the largest value; fails above ``bound``."""
    scale = max(expected.abs().max().item(), 1e-12)
    difference = (ours.float() - expected.float()).abs().max().item() / scale
    assert difference <= bound, f"{name}: differs by {difference} of the largest value {scale}"
    return difference
