"""A Llama-shaped HF decoder as the layers of a pipeline: embedding, decoder layers, final norm, head.

Every layer takes and returns a ``StageState``; the last one returns losses: fp32 [N] in training, in
evaluation [2, N] with the losses and, as 1.0, whether a target is the argmax. Modules are HF's own classes,
found through the family's ``...ForCausalLM`` class or, of a decoder inside a multimodal model, in its module
tree, so that rotary scaling, biases, query/key norms and sliding windows are HF's; under tensor parallelism
their linear layers are this rank's slices, and layers must be built inside ``empty_parameters()``. Shapes:
T packed tokens, N targets, H hidden size, V vocabulary.

DeepSpeed is imported where a layer that needs it is built: it looks for an accelerator and says what it
found, which nobody who reads a config wants to know.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from models.decoders import find_family, runtime_config, tensor_sizes, turns_by_type
from models.fused import fuse
from models.llm_ends import EmbedLayer, HeadLayer, tied_losses
from models.masks import MaskSpec, Packing
from models.moe import MoEBlock, build_moe
from models.packed import StageState
from omni_ds.parallel.layer_groups import ALONE, LayerGroups, degree
from omni_ds.plan.llm_meta import moe_layer_indices
from omni_ds.plan.region import Region
from omni_ds.plan.tensor_rules import check_tensor_degree, layer_styles

_OFFSET_NORMS = ("gemma3_text",)  # norms multiply by 1 + weight
TIED_KEY = "embed"


@dataclass(frozen=True)
class LayerDef:
    """How to build one layer: ``cls(*args, **kwargs)``.

    Layers of one ``tied_key`` share the module (on one stage) or its ``embed_tokens.weight`` (on two);
    ``forward_fn(module, state)``, when given, is called instead of the module.
    """

    cls: type[nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    tied_key: str | None = None
    forward_fn: Callable[[nn.Module, StageState], Any] | None = None

    def build(self) -> nn.Module:
        return self.cls(*self.args, **self.kwargs)


def layer_mask(config: PreTrainedConfig, index: int) -> MaskSpec:
    """Mask of a decoder layer: Mistral slides in every layer, Qwen in those its ``layer_types`` name."""
    types = getattr(config, "layer_types", None)
    slides = types[index] == "sliding_attention" if types else True
    return MaskSpec(causal=True, window=getattr(config, "sliding_window", None) if slides else None)


class _Rotary:
    """HF's rotary module outside the module tree: casts to bf16 must not touch its fp32 frequencies."""

    def __init__(self, cls: type[nn.Module], config: PreTrainedConfig):
        self.cls, self.config, self.module = cls, config, None

    def __call__(
        self, hidden: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.module is None:
            self.module = self.cls(self.config)
        self.module.to(hidden.device)
        return self.module(hidden, position_ids, *([layer_type] if layer_type else []))


class DecoderLayer(nn.Module):
    """One HF decoder layer on packed samples; with ``recompute`` its activations are recomputed in
    backward."""

    def __init__(
        self,
        config: PreTrainedConfig,
        index: int,
        recompute: bool = False,
        groups: LayerGroups = ALONE,
    ):
        super().__init__()
        family = find_family(config)
        self.groups = groups
        self.index, self.recompute, self.mask = index, recompute, layer_mask(config, index)
        self._type = config.layer_types[index] if turns_by_type(config) else None
        self._norms_at_zero = config.model_type in _OFFSET_NORMS
        sparse = index in moe_layer_indices(config.to_dict())
        parallel = sparse and degree(groups.expert) > 1
        with torch.device("meta") if parallel else nullcontext():
            self.layer = family.layer(config, index)
        self._moe: MoEBlock | None = None
        if sparse:
            self._moe, self.layer.mlp = build_moe(config, index, self.layer.mlp, groups)
        self._regions = _shard(self.layer, config, groups)
        fuse(self.layer)
        self._rotary = _Rotary(family.rotary, config)

    def hf_names(self) -> dict[str, str]:
        names = {
            f"layer.{name}": f"llm.model.layers.{self.index}.{name}"
            for name, _ in self.layer.named_parameters()
        }
        if self._moe is not None and self._moe.parallel:
            names |= {f"layer.mlp.{name}": whole for name, whole in self._moe.hf_names().items()}
        return names

    def regions(self) -> dict[str, Region]:
        """The parts of whole parameters that this rank holds, by local name."""
        held = {f"layer.{name}": region for name, region in self._regions.items()}
        if self._moe is not None and self._moe.parallel:
            held |= {f"layer.mlp.{name}": region for name, region in self._moe.regions().items()}
        return held

    def constants(self) -> dict[str, Tensor]:
        """Local name -> value of parameters that do not start at random."""
        return zero_norms(self) if self._norms_at_zero else {}

    def forward(self, state: StageState) -> StageState:
        """hidden [T, H] -> [T, H]. An empty micro-batch passes through: HF's layers cannot view 0 tokens."""
        if state.hidden.shape[0] == 0:
            return state
        hidden = state.hidden.unsqueeze(0)
        position_ids = state.batch.position_ids.unsqueeze(-2)  # [1, T], or [k, 1, T] of k kinds
        rotary = state.rotary.get(self._type)
        if rotary is None or rotary[0].dtype != hidden.dtype:
            rotary = state.rotary[self._type] = self._rotary(hidden, position_ids, self._type)
        if position_ids.dim() == 3:  # the kinds are for the rotation alone
            position_ids = position_ids[0]
        mask = replace(self.mask, spans=state.batch.spans) if state.batch.spans else self.mask
        packing = state.packing_for(self.groups.sequence).with_mask(mask)
        if self.recompute and self.training:
            out, logits = checkpoint(
                self._run,
                hidden,
                position_ids,
                rotary,
                packing,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            out, logits = self._run(hidden, position_ids, rotary, packing)
        state = state.with_hidden(out.squeeze(0))
        if self._moe is not None and self.training:
            state = state.with_routing(*self._moe.observe(logits, state.batch))
        return state.with_level()

    def _run(
        self, hidden: Tensor, position_ids: Tensor, rotary: tuple[Tensor, Tensor], packing: Packing
    ) -> tuple[Tensor, Tensor | None]:
        """(hidden [1, T, H], the router's logits [T, E] of a MoE layer): all that backward reaches has to be
        a result of the checkpointed function."""
        with self._moe.logits(self.layer.mlp) if self._moe else nullcontext([None]) as logits:
            out = self.layer(
                hidden,
                attention_mask=packing,
                position_ids=position_ids,
                position_embeddings=rotary,
                past_key_values=None,
                use_cache=False,
            )
        return out, logits[0]


def _shard(layer: nn.Module, config: PreTrainedConfig, groups: LayerGroups) -> dict[str, Region]:
    """Cut a decoder layer for this tensor rank; the regions of its parameters that are not whole."""
    if groups.tensor is None:
        return {}
    from omni_ds.parallel.tensor import shard_decoder_layer

    styles = layer_styles(config.base_model_tp_plan)
    return shard_decoder_layer(layer, tensor_sizes(config), styles, groups)


class NormLayer(nn.Module):
    """Picks the rows that predict a target and normalises them: hidden [T, H] -> [N, H]."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.norm = find_family(config).norm(config.hidden_size, eps=config.rms_norm_eps)
        self._norms_at_zero = config.model_type in _OFFSET_NORMS
        fuse(self.norm)

    def hf_names(self) -> dict[str, str]:
        return {"norm.weight": "llm.model.norm.weight"}

    def constants(self) -> dict[str, Tensor]:
        """Local name -> value of parameters that do not start at random."""
        return zero_norms(self) if self._norms_at_zero else {}

    def forward(self, state: StageState) -> StageState:
        return state.with_hidden(self.norm(state.hidden.index_select(0, state.batch.target_positions)))


def zero_norms(module: nn.Module) -> dict[str, Tensor]:
    """Where the norms of a decoder that multiply by 1 + weight start."""
    return {name: torch.zeros(p.shape) for name, p in module.named_parameters() if "norm" in name}


def build_llm_layers(
    config: PreTrainedConfig, *, recompute: bool = False, groups: LayerGroups = ALONE, levels: int = 0
) -> list[LayerDef]:
    """Definitions of the L + 3 layers of an LLM: embedding, L decoder layers, norm, head.

    Nothing is allocated. ``groups``: the process groups that layers compute in; a layer holds this rank's
    part. ``levels``: of feature rows, added behind decoder layers (deepstack). Raises UserError for a family,
    a rotary scaling or a tensor degree that is not supported.
    """
    find_family(config)
    check_tensor_degree(tensor_sizes(config), degree(groups.tensor))
    config, shared = runtime_config(config), {"groups": groups}
    tied = bool(config.tie_word_embeddings)
    ends = {**shared, "levels": levels}
    embed = LayerDef(EmbedLayer, (config,), ends, tied_key=TIED_KEY if tied else None)
    head = (
        LayerDef(EmbedLayer, (config,), ends, tied_key=TIED_KEY, forward_fn=tied_losses)
        if tied
        else LayerDef(HeadLayer, (config,), shared)
    )
    decoder = [
        LayerDef(DecoderLayer, (config, index), {"recompute": recompute, "groups": groups})
        for index in range(config.num_hidden_layers)
    ]
    return [embed, *decoder, LayerDef(NormLayer, (config,)), head]
