"""Decoders that can be an LLM: their HF classes, found from a config, and what of a config is refused."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from models.attention import ATTENTION_NAME
from models.moe import configure_experts
from omni_ds.errors import UserError
from omni_ds.plan.llm_meta import INSIDE
from omni_ds.plan.tensor_rules import TensorSizes

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma3_text")
# Frequencies of these depend on the longest sequence of a call: a sample would change with its neighbours.
_ROPE_TYPES = ("default", "linear", "yarn", "llama3")
# What HF's classes read from a config and no published decoder of these families has.
_ABSENT = ("use_bidirectional_attention", "attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True)
class Family:
    """HF classes of one decoder family; ``causal_lm`` None: it exists inside a multimodal model only."""

    causal_lm: type[nn.Module] | None
    layer: type[nn.Module]
    norm: type[nn.Module]
    rotary: type[nn.Module]


def find_family(config: PreTrainedConfig) -> Family:
    """HF classes for a config; UserError when the family or its rotary scaling is not supported."""
    if config.model_type not in (*FAMILIES, *INSIDE):
        raise UserError(
            f'omni.llm: model_type "{config.model_type}" is not supported as an LLM; '
            f"supported are {', '.join(FAMILIES)}"
        )
    rotations = config.rope_parameters or {}
    for rotation in rotations.values() if turns_by_type(config) else [rotations]:
        rope_type = (rotation or {}).get("rope_type", "default")
        if rope_type not in _ROPE_TYPES:
            raise UserError(
                f'omni.llm: rope_type "{rope_type}" depends on the length of the batch and cannot be packed; '
                f"use one of {', '.join(_ROPE_TYPES)}"
            )
    for key in _ABSENT:
        if getattr(config, key, None):
            raise UserError(
                f"omni.llm: a {config.model_type} with {key} {getattr(config, key)} is not supported"
            )
    if config.model_type in INSIDE:
        return _decoder_classes(config)
    causal_lm = AutoModelForCausalLM._model_mapping[type(config)]
    module, stem = sys.modules[causal_lm.__module__], causal_lm.__name__.removesuffix("ForCausalLM")
    return Family(
        causal_lm=causal_lm,
        layer=getattr(module, f"{stem}DecoderLayer"),
        norm=getattr(module, f"{stem}RMSNorm"),
        rotary=getattr(module, f"{stem}RotaryEmbedding"),
    )


def turns_by_type(config: PreTrainedConfig) -> bool:
    """Whether layers of different ``layer_types`` have rotations of their own."""
    return any(isinstance(value, Mapping) for value in (config.rope_parameters or {}).values())


_INSIDE: dict[type[PreTrainedConfig], Family] = {}


def _decoder_classes(config: PreTrainedConfig) -> Family:
    """Classes of a decoder without a causal LM of its own, from its module tree."""
    found = _INSIDE.get(type(config))
    if found is None:
        small = copy.deepcopy(config)
        small.num_hidden_layers = 1
        with torch.device("meta"):
            known = type(config) in AutoModel._model_mapping
            model = AutoModel.from_config(small) if known else _unlisted_decoder(config)(small)
        found = Family(None, type(model.layers[0]), type(model.norm), type(model.rotary_emb))
        _INSIDE[type(config)] = found
    return found


def _unlisted_decoder(config: PreTrainedConfig) -> type[nn.Module]:
    """The decoder's class where AutoModel has none: it is beside its config, and takes it."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    return next(
        cls
        for cls in vars(importlib.import_module(name)).values()
        if isinstance(cls, type)
        and issubclass(cls, PreTrainedModel)
        and cls.config_class is type(config)
        and cls.__name__.endswith("TextModel")
    )


def runtime_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy for building layers: packed attention, no dropout (it would depend on the packing)."""
    config = copy.deepcopy(config)
    config._attn_implementation = ATTENTION_NAME
    config.attention_dropout = 0.0
    configure_experts(config)
    return config


def tensor_sizes(config: PreTrainedConfig) -> TensorSizes:
    """What tensor parallelism cuts of a decoder."""
    return TensorSizes(
        config.num_attention_heads, config.num_key_value_heads, config.intermediate_size, config.vocab_size
    )
