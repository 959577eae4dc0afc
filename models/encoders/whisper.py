"""The Whisper encoder on clips of their own duration.

HF's encoder takes exactly 30 s. Here a clip of mel frames is cut into windows of that size and each window is
encoded at its true length: convolutions, positions 0.., layers and final norm as HF's modules on the
truncated sequence. With ``pad_to_window`` every window is full and the features are HF's on padded input.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder as WhisperTower

from models.attention import ATTENTION_NAME
from models.encoders.base import Encoder
from models.init import sinusoids
from models.transfer import on_device
from omni_ds.plan.encoder_meta import EncoderMeta

_NO_DROPOUT = ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop")


def whisper_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Config of the tower that is built: no dropout, packed attention."""
    config = copy.deepcopy(config)
    for key in _NO_DROPOUT:
        setattr(config, key, 0.0)
    config._attn_implementation = ATTENTION_NAME
    return config


def pad_window(mel: Tensor, frames: int) -> Tensor:
    """[mels, n <= frames] -> [mels, frames], filled with the value WhisperFeatureExtractor gives silence.

    It clips log10 energies to 8 below the clip's maximum (and at -10), then maps x to (x + 4) / 4: silence is
    2 below the maximum, at least -1.5. Frames next to the end differ slightly from features of padded
    *sound*, whose last analysis windows reach into the silence; features extracted from padded sound need no
    filling here.
    """
    if mel.shape[1] == frames:
        return mel
    silence = (mel.amax() - 2.0).clamp_min(-1.5)
    return torch.cat([mel, silence.expand(mel.shape[0], frames - mel.shape[1])], dim=1)


class WhisperEncoder(Encoder):
    """A Whisper encoder. Item: log-mel features [mels, frames]."""

    def __init__(self, meta: EncoderMeta, config: PreTrainedConfig, recompute: bool = False):
        super().__init__(meta, WhisperTower(whisper_config(config)), recompute)
        # sinusoids, which HF's class freezes as well
        self.unused = ("tower.embed_positions.weight",)

    def constants(self) -> dict[str, Tensor]:
        return {"tower.embed_positions.weight": sinusoids(self.meta.positions, self.meta.hidden)}

    def features(self, values: Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        weight = self.tower.conv1.weight
        windows, tokens = [], []
        for value in values:
            mel = value.to(weight.device, weight.dtype)
            cut = list(mel.split(self.meta.window, dim=1))
            if self.meta.pad_to_window:
                cut = [pad_window(window, self.meta.window) for window in cut]
            windows.extend(cut)
            tokens.append(sum((window.shape[1] + 1) // 2 for window in cut))
        segments = [(window.shape[1] + 1) // 2 for window in windows]
        hidden = embed_windows(self.tower, windows, segments, self.meta.window, self.tower.embed_positions)
        hidden = self.run_layers(self.tower.layers, hidden, segments)
        return self.tower.layer_norm(hidden), [(1, n) for n in tokens]


def embed_windows(
    tower: nn.Module,
    windows: Sequence[Tensor],
    segments: Sequence[int],
    limit: int,
    positions: Callable[[Tensor], Tensor],
) -> Tensor:
    """Windows [mels, n] -> packed tokens [sum of segments, C], positions added: the first ``segments`` of
    each window's. positions: int64 [n] -> embeddings [n, C].

    All windows lie on one time axis, one or two frames of zeros between them, each starting at an even
    frame: every module is called once, whatever the lengths (under ZeRO-3 a call is a collective), and
    nothing but the gaps is wasted. The first convolution's output is set to zero in the gaps and behind
    ``limit`` frames, which is what the second one finds beyond a window that stands alone.
    """
    device = windows[0].device
    frames = [window.shape[1] for window in windows]
    spans = [*(n + 2 - n % 2 for n in frames[:-1]), frames[-1]]
    axis = torch.cat([F.pad(w, (0, span - n)) for w, n, span in zip(windows, frames, spans, strict=True)], 1)
    inside = torch.cat([torch.arange(span) < min(n, limit) for n, span in zip(frames, spans, strict=True)])
    hidden = F.gelu(tower.conv1(axis[None])) * on_device(inside, device)
    hidden = F.gelu(tower.conv2(hidden))[0].T
    within = [torch.arange(n) for n in segments]
    starts = [0, *itertools.accumulate(span // 2 for span in spans)]
    rows = torch.cat([start + steps for start, steps in zip(starts, within, strict=False)])
    return hidden.index_select(0, on_device(rows, device)) + positions(on_device(torch.cat(within), device))
