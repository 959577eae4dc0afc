"""Expert parallelism with DeepSpeed's AutoEP layer: the layer itself, its groups and its optimizer groups.

A mixture of experts of degree ep holds experts [i * E / ep, (i + 1) * E / ep) (``even_part``) on rank i of
``LayerGroups.expert``; tokens travel to the experts they chose and back. Every rank of a tensor-parallel
group does the same with the same tokens, in an expert group of its own, so that the gradients of experts and
router are complete on each of them and no parameter is marked ``tensor_model_parallel``.

**Gradient scale: none is needed.** The backward of the exchange brings an expert the gradients of all tokens
of its expert group; the sum over ``expert_data`` is then the sum over all of data x sequence, and DeepSpeed
(ZeRO-1 and 2, BF16_Optimizer and the plain engine) divides that sum by the size of the whole
data-parallel group, as it does for dense parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omni_ds.parallel.layer_groups import LayerGroups, degree, index

PART_KEY = "part"
# AutoEP's presets, for blocks of the same shape under another name.
_PRESETS = {"qwen3_vl_moe_text": "qwen3_moe", "qwen3_omni_moe_text": "qwen3_moe"}


def expert_group_name(size: int) -> str:
    """DeepSpeed's name of expert groups of ``size`` ranks, in its tables and in optimizer groups."""
    return f"ep_size_{size}"


def build_expert_layer(block: nn.Module, config: Any, groups: LayerGroups, grouped: bool) -> nn.Module:
    """DeepSpeed's ``AutoEPMoELayer`` in the place of an HF block.

    Args:
        block: HF's sparse block (``gate``, ``experts``), on the meta device; only its shapes are used.
        config: HF config of a family that AutoEP has a preset for.
        groups: of this rank; the degree of ``expert`` must divide the experts.
        grouped: multiply with ``torch._grouped_mm``; otherwise expert by expert.

    Returns:
        The layer with this rank's experts (``experts.w1``, ``w3`` [local, I, H], ``w2`` [local, H, I]) and
        the whole router (``router.gate.weight`` [E, H]), on meta, bound to ``groups.expert``.
    """
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    size = degree(groups.expert)
    holder = nn.Module()
    holder.mlp, holder.config = block, copy.copy(config)
    holder.config.router_z_loss_coef = 0.0  # ours to compute; AutoEP warns that it does not
    if config.model_type == "qwen3_vl_moe_text":
        holder.config.norm_topk_prob = True  # HF's block does so whatever the config says
    section = {
        "enabled": True,
        "autoep_size": size,
        "preset_model": _PRESETS.get(config.model_type, config.model_type),
        "moe_layer_pattern": "mlp",
        "use_grouped_mm": grouped,
    }
    options = parse_autoep_config(section)
    (spec,) = AutoEP(holder, options).ep_parser()
    # Logits are taken from the gate itself: nothing to return, no second name for the router.
    spec = replace(spec, return_router_logits=False, router_logits_capture_target="none")
    with torch.device("meta"):
        layer = AutoEPMoELayer(spec, block, size, index(groups.expert), options)
    layer.tokens_per_expert = torch.zeros(spec.num_experts)
    layer.ep_group = groups.expert
    return layer


def register_expert_groups(groups: LayerGroups) -> None:
    """Tell DeepSpeed the expert groups of this rank, under the name its engines and optimizers ask for.

    To be called before an engine is built over :func:`build_expert_layer`: the engine would otherwise
    create groups of its own, across tensor-parallel ranks. Nothing to do without expert parallelism.
    """
    if degree(groups.expert) == 1:
        return
    from deepspeed.utils import groups as tables

    assert groups.expert_data is not None, "an expert group needs its expert-data group"
    name = expert_group_name(degree(groups.expert))
    tables._EXPERT_PARALLEL_GROUP[name] = groups.expert
    tables._EXPERT_PARALLEL_GROUP_RANKS[name] = dist.get_process_group_ranks(groups.expert)
    tables._EXPERT_DATA_PARALLEL_GROUP[name] = groups.expert_data
    tables._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = dist.get_process_group_ranks(groups.expert_data)


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether a parameter is reduced over ``expert_data``, as AutoEP marks its experts."""
    return not getattr(parameter, "allreduce", True)


def split_expert_groups(param_groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Optimizer groups in which dense and expert parameters do not share one.

    DeepSpeed wants experts in groups of their own with ``moe`` set, and looks up their process group by the
    group's ``name``. That name is then DeepSpeed's; ours moves to :data:`PART_KEY` (:func:`part_name`).
    All else (``lr``, ``weight_decay``) is copied. Dense groups come first, in their order.
    """
    dense, experts = [], []
    for group in param_groups:
        parameters = list(group["params"])
        by_name: dict[str, list[nn.Parameter]] = {}
        for parameter in parameters:
            if is_expert(parameter):
                by_name.setdefault(parameter.group_name, []).append(parameter)
        others = [parameter for parameter in parameters if not is_expert(parameter)]
        if others or not by_name:
            dense.append({**group, "params": others})
        for name, held in by_name.items():
            experts.append({**group, "params": held, "name": name, "moe": True, PART_KEY: group["name"]})
    return [*dense, *experts]


def part_name(group: Mapping[str, Any]) -> str:
    """The part an optimizer group belongs to, whatever DeepSpeed calls the group."""
    return group.get(PART_KEY) or group["name"]


def expert_gradient_norms(gradients: Mapping[str, list[Tensor]]) -> list[Tensor]:
    """One fp32 scalar [1] a name: the norm of the expert gradients of this stage over all expert ranks.

    Args:
        gradients: group name -> reduced gradients of this rank's experts, as
            ``BF16_Optimizer.get_grads_for_norm()[1]`` has them. Collective over the expert group.

    DeepSpeed's optimizer lists them on every tensor rank: count the result on the first one only.
    """
    from deepspeed.utils import groups as tables

    norms = []
    for name, tensors in gradients.items():
        total = torch.stack(torch._foreach_norm(tensors, dtype=torch.float32)).square().sum().reshape(1)
        dist.all_reduce(total, group=tables._get_expert_parallel_group(name))
        norms.append(total.sqrt())
    return norms
