"""The audio towers of Qwen2.5-Omni and Qwen3-Omni on packed clips.

HF's modules on the chunks of all clips at once. HF cuts the input of attention by ``cu_seqlens`` for back
ends it does not know, so attention is called here. The projector is what follows the last norm.
"""

from __future__ import annotations

import copy
import itertools
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from models.attention import ATTENTION_NAME, omni_attention
from models.encoders.base import Encoder
from models.encoders.whisper import embed_windows
from models.masks import Packing
from omni_ds.plan.towers.omni_audio import OmniAudioMeta

_NO_DROPOUT = ("dropout", "attention_dropout", "activation_dropout")


def omni_audio_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Config of the tower that is built: no dropout, packed attention."""
    config = copy.deepcopy(config)
    for key in _NO_DROPOUT:
        setattr(config, key, 0.0)
    config._attn_implementation = ATTENTION_NAME
    return config


class _OmniAudioEncoder(Encoder):
    """Item: log-mel features [mels, frames]."""

    meta: OmniAudioMeta

    def __init__(self, meta: OmniAudioMeta, tower: nn.Module, projector: nn.Module, recompute: bool):
        super().__init__(meta, tower, recompute, projector)
        for layer in tower.layers:
            layer.self_attn.forward = partial(_attend, layer.self_attn)

    def features(self, values: Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        weight = next(self.tower.parameters())
        clips = [value.to(weight.device, weight.dtype) for value in values]
        measured = [self.meta.measure(clip.shape[1:]) for clip in clips]
        hidden = self.embed(clips)
        hidden = self.run_layers(self.tower.layers, hidden, [n for segments, _ in measured for n in segments])
        hidden = self.pool(hidden, [sum(segments) for segments, _ in measured])
        return self.tower.ln_post(hidden), [(1, rows) for _, rows in measured]

    @abstractmethod
    def embed(self, clips: Sequence[Tensor]) -> Tensor:
        """Clips [mels, frames] -> packed tokens [T, C], positions in each chunk added."""

    def pool(self, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        """What is left of the tokens of each clip before the last norm."""
        return hidden

    def project(self, features: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        return self.projector(features)

    def _positions(self, at: Tensor) -> Tensor:
        table = self.tower.positional_embedding.positional_embedding
        return table.index_select(0, at).to(next(self.tower.parameters()).dtype)


class Qwen25OmniAudioEncoder(_OmniAudioEncoder):
    """Chunks of one convolution of stride 2 attend to themselves; pairs of tokens become one row."""

    def __init__(self, meta: OmniAudioMeta, config: PreTrainedConfig, recompute: bool = False):
        from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder

        tower = Qwen2_5OmniAudioEncoder._from_config(omni_audio_config(config))
        projector = tower.proj
        del tower.proj
        super().__init__(meta, tower, projector, recompute)
        self.unused = ("tower.audio_bos_eos_token.weight",)  # HF's class does not use it either

    def embed(self, clips: Sequence[Tensor]) -> Tensor:
        chunks = [chunk for clip in clips for chunk in clip.split(self.meta.chunk, dim=1)]
        lengths = [self.meta.tokens(chunk.shape[1]) for chunk in chunks]
        return embed_windows(self.tower, chunks, lengths, self.meta.chunk, self._positions)

    def pool(self, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        whole = torch.cat([clip[: len(clip) // 2 * 2] for clip in hidden.split(list(tokens))])
        return whole.unflatten(0, (-1, 2)).sum(1) / 2


class OmniProjector(nn.Module):
    """Linear, GELU, linear: what Qwen3-Omni's tower ends with."""

    def __init__(self, tower: nn.Module):
        super().__init__()
        self.proj1, self.act, self.proj2 = tower.proj1, tower.act, tower.proj2

    def forward(self, features: Tensor) -> Tensor:
        return self.proj2(self.act(self.proj1(features)))


class Qwen3OmniAudioEncoder(_OmniAudioEncoder):
    """Three convolutions over frames and mel bins; several chunks attend to each other."""

    def __init__(self, meta: OmniAudioMeta, config: PreTrainedConfig, recompute: bool = False):
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

        tower = Qwen3OmniMoeAudioEncoder._from_config(omni_audio_config(config))
        projector = OmniProjector(tower)
        del tower.proj1, tower.proj2, tower.act
        super().__init__(meta, tower, projector, recompute)

    def embed(self, clips: Sequence[Tensor]) -> Tensor:
        device, chunk = clips[0].device, self.meta.chunk
        cut = [clip.split(chunk, dim=1) for clip in clips]
        chunks = list(itertools.chain.from_iterable(cut))
        # How far the convolutions find zeros of padding, not of their own borders: a chunk alone has none.
        reach = [length for pieces in cut for length in [pieces[0].shape[1]] * len(pieces)]
        hidden = torch.stack([F.pad(piece, (0, max(reach) - piece.shape[1])) for piece in chunks])
        hidden, ends = hidden.unsqueeze(1), torch.tensor(reach, device=device)
        for convolution in (self.tower.conv2d1, self.tower.conv2d2, self.tower.conv2d3):
            hidden, ends = F.gelu(convolution(hidden)), (ends + 1) // 2
            steps = torch.arange(hidden.shape[3], device=device)
            hidden = hidden * (steps < ends.unsqueeze(1)).unflatten(1, (1, 1, -1))
        hidden = self.tower.conv_out(hidden.permute(0, 3, 1, 2).flatten(2))  # [chunks, steps, C]
        counts = [self.meta.tokens(piece.shape[1]) for piece in chunks]
        within = torch.cat([torch.arange(count) for count in counts])
        places = within + torch.arange(len(chunks)).repeat_interleave(torch.tensor(counts)) * hidden.shape[1]
        rows = hidden.flatten(0, 1).index_select(0, places.to(device))
        return rows + self._positions(within.to(device))


def _attend(attention: nn.Module, hidden_states: Tensor, cu_seqlens: Packing, **kwargs: object) -> Tensor:
    """The ``forward`` of HF's audio attention on hidden states [1, T, C], with a Packing in the place of
    ``cu_seqlens``."""
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    heads = [
        project(hidden_states).unflatten(2, (attention.num_heads, -1)).transpose(1, 2)
        for project in projections
    ]
    out, _ = omni_attention(attention, *heads, cu_seqlens)
    return attention.out_proj(out.flatten(2))
