"""Qwen2.5-VL by Hugging Face's class in a plain loop, on the samples that our engine trains.

- ``stock``: a sample at a time, scaled_dot_product_attention, layers recomputed (else it runs out of memory):
  what a short script does.
- ``padded``: micro-batches of four, padded, layers recomputed, attention by the packed-sequence kernel.
- ``packed``: micro-batches of whole samples one after the other, the same kernel, Liger's fused layers and
  loss, layers recomputed.

All with bf16 weights, fp32 masters and AdamW, as ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from benchmarks.parts.masters import MasterAdamW
from omni_ds.plan.sample import SampleMeta

VARIANTS = ("stock", "padded", "packed")
_KERNEL = "flash_packed"  # HF's vision attention hands cu_seqlens to what is called flash...
_PADDED = 4


class StockModel:
    """A variant on the device. budget: tokens of a micro-batch of ``packed``."""

    def __init__(self, variant: str, folder: Path, device: torch.device, budget: int):
        from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

        if variant == "packed":
            from liger_kernel.transformers import apply_liger_kernel_to_qwen2_5_vl

            apply_liger_kernel_to_qwen2_5_vl()
        self.variant, self.budget, self.device = variant, budget, device
        config = AutoConfig.from_pretrained(folder)
        with torch.device(device):
            self.model = Qwen2_5_VLForConditionalGeneration._from_config(
                config, attn_implementation="sdpa", dtype=torch.bfloat16
            )
        self.model.train()
        self._segments: Tensor | None = None
        self.model.gradient_checkpointing_enable()
        if variant != "stock":
            self._replace_attention()
        self.optimizer = MasterAdamW(self.model.parameters())

    def _replace_attention(self) -> None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(_KERNEL, self._attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(_KERNEL, lambda *args, **kwargs: None)
        for module in self.model.modules():
            config = getattr(module, "config", None)
            if config is not None:
                config._attn_implementation_internal = _KERNEL

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """HF attention function: [B, heads, T, D] -> [B, T, heads, D]."""
        repeats, batch = query.shape[1] // key.shape[1], query.shape[0]
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        segments, longest = kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_q")
        causal = segments is None
        if causal:
            segments, longest = self._segments, self._longest
        segments, longest = segments.to(torch.int32), int(longest)
        window = (-1, 0) if causal else (-1, -1)
        out = varlen_attn(
            q, k, v, segments, segments, longest, longest, scale=kwargs.get("scaling"), window_size=window
        )
        return out.unflatten(0, (batch, -1)), None

    def run(self, samples: Sequence[SampleMeta]) -> float:
        """One optimizer step on all samples; the mean loss of their targets."""
        targets, total = sum(_text(sample) for sample in samples), 0.0
        for group in self._micro_batches(samples):
            inputs, count = self._inputs(group)
            loss = self.model(**inputs, use_cache=False).loss * (count / targets)
            loss.backward()
            self.optimizer.accumulate()
            total += loss.detach()
        self.optimizer.step()
        return float(total)

    def _micro_batches(self, samples: Sequence[SampleMeta]) -> Iterator[list[SampleMeta]]:
        if self.variant != "packed":
            size = 1 if self.variant == "stock" else _PADDED
            ordered = sorted(samples, key=lambda sample: sample.tokens)
            yield from (list(ordered[i : i + size]) for i in range(0, len(ordered), size))
            return
        group: list[SampleMeta] = []
        for sample in sorted(samples, key=lambda sample: -sample.tokens):
            if group and sum(s.tokens for s in group) + sample.tokens > self.budget:
                yield group
                group = []
            group.append(sample)
        yield group

    def _inputs(self, samples: Sequence[SampleMeta]) -> tuple[dict[str, Any], int]:
        """Keyword arguments of the class's forward, and how many tokens are targets."""
        config, rows = self.model.config, []
        for sample in samples:
            generator = torch.Generator().manual_seed(sample.row)
            ids = torch.randint(1000, 100000, (sample.tokens,), generator=generator)
            for item in sample.items:
                for start, length in item.spans:
                    ids[start : start + length] = config.image_token_id
            rows.append(ids)
        lengths = [len(ids) for ids in rows]
        longest = max(lengths)
        if self.variant == "packed":
            whole = torch.cat(rows)[None]
            positions = torch.cat([torch.arange(n) for n in lengths])[None]
            edges, self._longest = [0, *torch.tensor(lengths).cumsum(0).tolist()], longest
        else:
            whole = torch.zeros(len(rows), longest, dtype=torch.int64)
            for row, ids in zip(whole, rows, strict=True):
                row[: len(ids)] = ids
            positions = torch.arange(longest).expand(len(rows), -1)
            edges, self._longest = [n * longest for n in range(len(rows) + 1)], longest
        self._segments = torch.tensor(edges, dtype=torch.int32, device=self.device)
        real = torch.zeros_like(whole, dtype=torch.bool)
        if self.variant == "packed":
            real[:] = True
        else:
            for row, n in zip(real, lengths, strict=True):
                row[:n] = True
        labels = torch.where(real & (whole != config.image_token_id), whole, -100)
        inputs = {
            "input_ids": whole,
            "labels": labels,
            "position_ids": positions.expand(3, *positions.shape),
            "mm_token_type_ids": (whole == config.image_token_id).long(),
        }
        items = [item for sample in samples for item in sample.items]
        if items:
            patch = config.vision_config.patch_size
            grids = [(1, item.shape[0] // patch, item.shape[1] // patch) for item in items]
            inputs["image_grid_thw"] = torch.tensor(grids)
            patches = sum(math.prod(grid) for grid in grids)
            width = 3 * config.vision_config.temporal_patch_size * patch**2
            inputs["pixel_values"] = torch.randn(patches, width, device=self.device, dtype=torch.bfloat16)
        return {name: value.to(self.device) for name, value in inputs.items()}, int((labels >= 0).sum())


def _text(sample: SampleMeta) -> int:
    return sample.tokens - sum(item.rows for item in sample.items)
