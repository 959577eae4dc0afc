"""Quicker forwards of HF's layers, on CUDA: fewer passes over the activations, and fewer of them kept.

Norms, the gated MLP's product and rotary embedding are a chain of small kernels in HF's modules; ours
(models/norms.py) and Liger's are one each, where Liger is installed. RMSNorms that ours do not take are
torch's. Projections and MLPs keep less (models/linears.py).
Modules are changed one by one, as instances; HF's classes stay as they are, and on a CPU so does what the
instances do.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import kernel_head_dim, omni_attention, packing_of
from models.gated_mlp import can_fuse, gated_mlp
from models.liger import has_liger
from models.linears import are_plain, linear_of_heads, mlp, project, project_heads
from models.norms import can_norm, norm
from models.weight_gradient import adder


def fuse(module: nn.Module) -> None:
    """Give norms, linears, MLPs and attentions inside a layer of HF's (or a norm itself) quicker forwards.

    Same names, parameters and results to rounding.
    """
    for part in module.modules():
        forward = _forward_of(part)
        if forward is not None:
            part.forward = MethodType(forward, part)


_TOWER_ATTENTIONS = {"SiglipAttention", "Siglip2Attention", "CLIPAttention", "WhisperAttention"}
_TOWER_MLPS = {"SiglipMLP", "Siglip2MLP", "CLIPMLP"}
# Layers that are hidden + attention(norm(hidden)), then hidden + mlp(norm(hidden)): what they call these.
_RESIDUAL_LAYERS = {
    **dict.fromkeys(
        ("SiglipEncoderLayer", "Siglip2EncoderLayer", "CLIPEncoderLayer"),
        ("layer_norm1", "self_attn", "layer_norm2", "mlp"),
    ),
    **dict.fromkeys(
        (
            "Qwen2VLVisionBlock",
            "Qwen2_5_VLVisionBlock",
            "Qwen2_5OmniVisionBlock",
            "Qwen3VLVisionBlock",
            "Qwen3VLMoeVisionBlock",
            "Qwen3OmniMoeVisionBlock",
        ),
        ("norm1", "attn", "norm2", "mlp"),
    ),
    **dict.fromkeys(
        (
            "LlamaDecoderLayer",
            "MistralDecoderLayer",
            "MixtralDecoderLayer",
            "Qwen2DecoderLayer",
            "Qwen2VLDecoderLayer",
            "Qwen2_5_VLDecoderLayer",
            "Qwen2_5OmniDecoderLayer",
            "Qwen3DecoderLayer",
            "Qwen3MoeDecoderLayer",
            "Qwen3VLTextDecoderLayer",
            "Qwen3VLMoeTextDecoderLayer",
            "Qwen3OmniMoeThinkerTextDecoderLayer",
        ),
        ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    ),
}


def _forward_of(module: nn.Module) -> Any:
    name = type(module).__name__
    if name in _TOWER_ATTENTIONS:
        return _tower_attention
    if name in _TOWER_MLPS:
        return _tower_mlp
    if name == "WhisperEncoderLayer":
        return _whisper_layer
    if name in _RESIDUAL_LAYERS:
        return _residual_layer
    if type(module) is nn.LayerNorm or (name.endswith("RMSNorm") and hasattr(module, "variance_epsilon")):
        return _norm
    if type(module) is nn.Linear:
        return _linear
    if not has_liger():
        return None
    if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return _swiglu if "silu" in type(module.act_fn).__name__.lower() else None
    if all(hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim")):
        turns = "position_embeddings" in inspect.signature(type(module).forward).parameters
        return _attention if turns else None
    return None


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key [T, heads, D] turned by halves, in fp32. cos, sin: [T, D] fp32."""
    if not (query.is_cuda and has_liger()):
        return _turned(query, cos, sin), _turned(key, cos, sin)
    from liger_kernel.ops import LigerRopeFunction

    heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (query, key))
    query, key = LigerRopeFunction.apply(*heads_first, cos, sin)
    return query.squeeze(0).transpose(0, 1), key.squeeze(0).transpose(0, 1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * cos.unsqueeze(1) + turned * sin.unsqueeze(1)).to(x.dtype)


def _norm(self: nn.Module, hidden_states: Tensor, passes: bool = False) -> Any:
    """Of LayerNorm and RMSNorm. passes: also hidden_states, for what else they go to (models/norms.py)."""
    centred = isinstance(self, nn.LayerNorm)
    if can_norm(hidden_states, self.weight):
        eps, bias = (self.eps, self.bias) if centred else (self.variance_epsilon, None)
        return norm(hidden_states, self.weight, bias, eps, centred, passes)
    if centred or not _on_gpu(hidden_states):
        out = type(self).forward(self, hidden_states)
    else:
        out = F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)
    return (out, hidden_states) if passes else out


def _residual_layer(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not _on_gpu(hidden_states):
        return type(self).forward(self, hidden_states, *args, **kwargs)
    first, attention, second, mlp = (getattr(self, name) for name in _RESIDUAL_LAYERS[type(self).__name__])
    normed, hidden = first(hidden_states, passes=True)
    attended = attention(normed, *args, **kwargs)
    attended = attended[0] if isinstance(attended, tuple) else attended
    normed, hidden = second(hidden + attended, passes=True)
    return hidden + mlp(normed)


def _linear(self: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, self.weight, self.bias) if adder(self.weight) is None else project(x, (self,))[0]


def _swiglu(self: nn.Module, x: Tensor) -> Tensor:
    if not _on_gpu(x):
        return type(self).forward(self, x)
    if can_fuse(self):
        return gated_mlp(self, x)
    from liger_kernel.ops import LigerSiLUMulFunction

    return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


def _attention(
    self: nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """HF's attention of the Llama shape, with the query and key norms of Qwen3 where there are any."""
    # Rotations of several kinds are chosen from in HF's attention of some releases (mrope).
    if not _on_gpu(hidden_states) or position_embeddings[0].dim() > 3:
        return type(self).forward(
            self,
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            **kwargs,
        )
    from liger_kernel.ops import LigerRopeFunction

    query, key, value = _heads(self, hidden_states)
    if hasattr(self, "q_norm"):
        query, key = self.q_norm(query), self.k_norm(key)
    query, key = LigerRopeFunction.apply(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
    out, _ = omni_attention(self, query, key, value.transpose(1, 2), attention_mask, scaling=self.scaling)
    return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


def _heads(self: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values [..., heads, head size] of x [..., C]."""
    linears = (self.q_proj, self.k_proj, self.v_proj)
    parts = project(x, linears) if are_plain(linears) else [linear(x) for linear in linears]
    return tuple(part.unflatten(-1, (-1, self.head_dim)) for part in parts)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _tower_attention(
    self: nn.Module, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Of SigLIP, CLIP and Whisper. HF scales Whisper's queries before the product, others' behind it: that is
    the same but for rounding."""
    if not _on_gpu(hidden_states):
        return type(self).forward(self, hidden_states, attention_mask=attention_mask, **kwargs)
    linears, size = (self.q_proj, self.k_proj, self.v_proj), self.head_dim
    packing = packing_of(self, attention_mask)
    width = kernel_head_dim(hidden_states.device, hidden_states.dtype, size, packing)
    if width == size or packing.ulysses is not None or not are_plain((*linears, self.out_proj)):
        heads, out_proj = _heads(self, hidden_states), self.out_proj
    else:  # zeros come out of the projections, which costs less than to copy heads
        heads = project_heads(hidden_states, linears, size, width)
        out_proj = partial(linear_of_heads, self.out_proj, size=size, width=width)
    query, key, value = (x.transpose(1, 2) for x in heads)
    out, _ = omni_attention(self, query, key, value, packing, scaling=size**-0.5)
    return out_proj(out.flatten(-2)), None


def _tower_mlp(self: nn.Module, hidden_states: Tensor) -> Tensor:
    if not _on_gpu(hidden_states) or not are_plain((self.fc1, self.fc2)):
        return type(self).forward(self, hidden_states)
    return mlp(hidden_states, self.fc1, self.activation_fn, self.fc2)


def _whisper_layer(self: nn.Module, hidden_states: Tensor, attention_mask: Any, **kwargs: Any) -> Tensor:
    """Without the dropouts, which a tower is built without."""
    if not _on_gpu(hidden_states) or not are_plain((self.fc1, self.fc2)):
        return type(self).forward(self, hidden_states, attention_mask, **kwargs)
    normed, hidden = self.self_attn_layer_norm(hidden_states, passes=True)
    attended, _ = self.self_attn(normed, attention_mask=attention_mask)
    normed, hidden = self.final_layer_norm(hidden + attended, passes=True)
    return hidden + mlp(normed, self.fc1, self.activation_fn, self.fc2)
