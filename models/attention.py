"""Attention on packed sequences, behind HF's AttentionInterface under the name ``omni_varlen``.

The back end is chosen at the call, by device, dtype, head size and mask:

- ``flash_attn_3``, ``flash_attn_4``, ``flash_attn``: the flash-attn packages (models/flash_attention.py),
  CUDA, bf16 and fp16.
- ``varlen``: ``torch.nn.attention.varlen`` (FlashAttention-2 inside torch), CUDA, bf16 and fp16.
- ``sdpa``: batches of segments of like length through scaled_dot_product_attention; any device and dtype,
  exact.

A sequence that is cut over several ranks is attended to by Ulysses: all tokens of some heads on each rank.

Shapes: T packed tokens, A query heads, K key heads, D head size, S longest segment of a batch of n.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from models import flash_attention
from models.masks import MaskSpec, Packing, PaddedGroup
from models.spans import Call, attend, visible
from omni_ds.errors import UserError
from omni_ds.parallel.ulysses import grouped_heads

ATTENTION_NAME = "omni_varlen"

_HALF = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class Backend:
    """A kernel and what it can do. ``run(query [T, A, D], key [T, K, D], value, packing, scale) -> [T, A,
    D]``. ``least_segment``: where all segments are shorter, the next kernel is quicker. ``head_dim_filled``:
    heads of other sizes are filled up with zeros to a multiple of it."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor, Packing, float], Tensor]
    features: frozenset[str]
    available: Callable[[], bool] = lambda: True
    device: str | None = None
    dtypes: frozenset[torch.dtype] | None = None
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    head_dim_filled: int = 1
    least_segment: int = 0

    def fits(self, device: torch.device, dtype: torch.dtype, head_dim: int | None) -> bool:
        return (
            (self.device is None or self.device == device.type)
            and (self.dtypes is None or dtype in self.dtypes)
            and (head_dim is None or self.max_head_dim is None or head_dim <= self.max_head_dim)
            and (head_dim is None or head_dim % self.head_dim_multiple == 0)
            and self.available()
        )


def _run_varlen(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # Fewer heads of keys are shared by those of queries; releases that do not ask just do it.
    grouped = {}
    if query.shape[1] != key.shape[1] and "enable_gqa" in _varlen_parameters():
        grouped = {"enable_gqa": True}

    def kernel(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        return varlen_attn(
            query,
            key,
            value,
            call.cu_queries,
            call.cu_keys,
            call.longest_query,
            call.longest_key,
            scale=scale,
            window_size=call.window,
            **grouped,
        )

    return attend(kernel, query, key, value, packing)


def _run_sdpa(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    groups, inverse = packing.groups
    outputs = []
    for group in groups:
        # [T, heads, D] -> [n, heads, S, D]
        batch = [
            (x if inverse is None else x.index_select(0, group.rows.flatten())) for x in (query, key, value)
        ]
        q, k, v = (x.unflatten(0, group.rows.shape).transpose(1, 2) for x in batch)
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        if packing.mask.spans and packing.mask.causal:
            mask, is_causal = visible(packing, group), False
        else:
            mask, is_causal = _block_mask(group, packing.mask, query.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    if not outputs:
        return query
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return packed if inverse is None else packed.index_select(0, inverse)


def _block_mask(group: PaddedGroup, mask: MaskSpec, device: torch.device) -> tuple[Tensor | None, bool]:
    """(boolean mask, is_causal) for one batch. Padding stands at the end, where causal queries never look."""
    size = group.longest
    if mask.causal:
        if mask.window is None or mask.window >= size:
            return None, True
        steps = torch.arange(size, device=device)
        distance = steps.unsqueeze(1) - steps
        return (distance >= 0) & (distance < mask.window), False
    if group.uniform:
        return None, False
    lengths = torch.tensor(group.lengths, device=device)
    return (torch.arange(size, device=device) < lengths.unsqueeze(1))[:, None, None, :], False


@cache
def _varlen_parameters() -> frozenset[str]:
    """Parameters of torch's varlen attention, growing from release to release; none where it is missing."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return frozenset()
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def _has_varlen() -> bool:
    return {"scale", "window_size"} <= _varlen_parameters()


def _flash_attention(name: str, generation: int, least_segment: int = 0) -> Backend:
    return Backend(
        name,
        partial(flash_attention.run, generation),
        frozenset({"causal", "window", "spans", "softcap"}),
        available=partial(flash_attention.usable, generation),
        device="cuda",
        dtypes=_HALF,
        max_head_dim=256,
        head_dim_multiple=8,
        head_dim_filled=flash_attention.HEAD_DIM_MULTIPLE.get(generation, 1),
        least_segment=least_segment,
    )


BACKENDS = (
    _flash_attention("flash_attn_3", 3),
    _flash_attention("flash_attn_4", 4, least_segment=256),
    _flash_attention("flash_attn", 2),
    Backend(
        "varlen",
        _run_varlen,
        frozenset({"causal", "window", "spans"}),
        available=_has_varlen,
        device="cuda",
        dtypes=_HALF,
        max_head_dim=256,
        head_dim_multiple=8,
    ),
    Backend("sdpa", _run_sdpa, frozenset({"causal", "window", "spans"})),
)


def select_backend(
    device: torch.device, dtype: torch.dtype, head_dim: int | None, mask: MaskSpec, longest: int | None = None
) -> Backend:
    """The first back end that runs here and can do what the mask asks; UserError when none can.

    longest: tokens of the longest segment; None: long.
    """
    usable = [backend for backend in BACKENDS if backend.fits(device, dtype, head_dim)]
    able = [backend for backend in usable if mask.features <= backend.features]
    kernels = [b for b in able if b.device and (longest is None or longest >= b.least_segment)]
    if able:
        return (kernels or able)[0]
    if not usable:
        names = ", ".join(backend.name for backend in BACKENDS)
        raise UserError(
            f"attention: none of {names} runs on {device.type} in {dtype} with heads of {head_dim}"
        )
    known = "; ".join(f"{backend.name} does {', '.join(sorted(backend.features))}" for backend in usable)
    raise UserError(
        f"attention needs {', '.join(sorted(mask.features))} on {device.type} in {dtype}, and no back end "
        f"available does all of it ({known}); install flash-attn or choose a model without it"
    )


def kernel_head_dim(device: torch.device, dtype: torch.dtype, head_dim: int, packing: Packing) -> int:
    """The head size that the kernel chosen for a packing computes with, zeros behind ``head_dim``."""
    backend = select_backend(device, dtype, head_dim, packing.mask, packing.max_seqlen)
    return -(-head_dim // backend.head_dim_filled) * backend.head_dim_filled


def packing_of(module: nn.Module, attention_mask: Packing | None) -> Packing:
    """The Packing in the place of HF's mask, or as the attribute of a module whose layer takes no mask."""
    packing = getattr(module, "packing", None) if attention_mask is None else attention_mask
    assert isinstance(packing, Packing), "packed attention takes a Packing"
    return packing


def describe_backend(device: torch.device | str, dtype: torch.dtype, head_dim: int | None = None) -> str:
    """One line for the log: which attention runs causal packed sequences on this device in this dtype."""
    device = torch.device(device)
    backend = select_backend(device, dtype, head_dim, MaskSpec(causal=True))
    reason = {
        "flash_attn_3": "flash-attn 3, packed sequences",
        "flash_attn_4": "flash-attn 4, packed sequences",
        "flash_attn": "flash-attn 2, packed sequences",
        "varlen": f"torch.nn.attention.varlen (FlashAttention-2) of torch {torch.__version__}",
        "sdpa": "scaled_dot_product_attention on batches of segments of like length",
    }
    return f"{backend.name}: {reason[backend.name]}, {device.type}, {str(dtype).removeprefix('torch.')}"


def omni_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Packing | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """HF attention function. query [B, A, T, D], key and value [B, K, T, D] -> ([B, T, A, D], None).

    B is 1 and attention stays inside the segments of the Packing, which comes in the place of HF's mask, or
    as the attribute ``packing`` of an attention module whose layer takes no mask. With ``packing.ulysses``
    the T tokens are this rank's shard of the packing.
    """
    assert dropout == 0.0, "dropout inside packed attention would depend on the packing"
    packing = packing_of(module, attention_mask)
    assert query.shape[0] == 1, "packed attention takes [1, T, C]"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x.transpose(1, 2).squeeze(0) for x in (query, key, value))
    ulysses = packing.ulysses
    if ulysses is None:
        return _attend(q, k, v, packing, scale, None).unsqueeze(0), None
    heads = q.shape[1]
    q, k, v, kv_of_head = ulysses.to_heads(q, k, v)
    out = _attend(q, k, v, packing, scale, kv_of_head)
    return ulysses.to_tokens(out, heads).unsqueeze(0), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scale: float,
    kv_of_head: tuple[int, ...] | None,
) -> Tensor:
    """Query [T, A, D], key and value [T, K, D] of the whole packing -> [T, A, D]; A may be 0.

    kv_of_head: the key-value head of each query head; None: A / K share one.
    """
    if query.shape[1] == 0:
        return value  # of no heads either; the kernels take none
    backend = select_backend(query.device, query.dtype, query.shape[-1], packing.mask, packing.max_seqlen)
    kv_heads = key.shape[1]
    if kv_of_head is not None and (
        query.shape[1] % kv_heads or kv_of_head != grouped_heads(query.shape[1], kv_heads)
    ):
        key, value = (_heads_of(x, kv_of_head) for x in (key, value))
    return backend.run(query, key, value, packing, scale)


def _heads_of(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """``x[:, heads]`` without an index tensor, whose copy to the device would make the host wait."""
    single = x.unbind(1)
    return torch.stack([single[head] for head in heads], dim=1)


AttentionInterface.register(ATTENTION_NAME, omni_attention)
