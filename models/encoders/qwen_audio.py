"""The audio tower of Qwen2-Audio: Whisper's modules on a clip and the silence its convolutions reach."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder

from models.encoders.base import Encoder
from models.encoders.whisper import embed_windows, whisper_config
from omni_ds.plan.towers.qwen_audio import QwenAudioMeta


class LinearProjector(nn.Module):
    """HF's ``multi_modal_projector`` of Qwen2-Audio."""

    def __init__(self, meta: QwenAudioMeta):
        super().__init__()
        self.linear = nn.Linear(meta.hidden, meta.out_hidden)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features)


class QwenAudioEncoder(Encoder):
    """Item: log-mel features [mels, frames of sound + REACH], zeros beyond a full window."""

    def __init__(self, meta: QwenAudioMeta, config: PreTrainedConfig, recompute: bool = False):
        tower = Qwen2AudioEncoder(whisper_config(config))
        super().__init__(meta, tower, recompute, LinearProjector(meta))
        self.unused = ("tower.embed_positions.weight",)

    def features(self, values: Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        tower, weight = self.tower, self.tower.conv1.weight
        clips = [value.to(weight.device, weight.dtype) for value in values]
        segments = [self.meta.measure(clip.shape[1:])[0][0] for clip in clips]
        hidden = embed_windows(tower, clips, segments, self.meta.window, tower.embed_positions)
        hidden = self.run_layers(tower.layers, hidden, segments)
        whole = torch.cat([clip[: len(clip) // 2 * 2] for clip in hidden.split(segments)])
        pooled = tower.avg_pooler(whole.T).T  # pairs do not cross clips: each has an even number of tokens
        return tower.layer_norm(pooled), [(1, n // 2) for n in segments]

    def project(self, features: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        return self.projector(features)
