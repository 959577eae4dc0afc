"""The audio tower of Voxtral: Whisper's modules on windows that are filled with silence."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig
from transformers.models.voxtral.modeling_voxtral import VoxtralEncoder as VoxtralTower

from models.encoders.base import Encoder
from models.encoders.whisper import WhisperEncoder, whisper_config
from models.projector import Projector
from omni_ds.plan.towers.voxtral import VoxtralMeta


class VoxtralProjector(Projector):
    """HF's ``multi_modal_projector`` of Voxtral: the MLP has no biases."""

    def __init__(self, meta: VoxtralMeta):
        super().__init__(meta)
        self.linear_1 = nn.Linear(meta.projector_in, meta.projector_hidden, bias=False)
        self.linear_2 = nn.Linear(meta.projector_hidden, meta.out_hidden, bias=False)


class VoxtralEncoder(WhisperEncoder):
    """Item: log-mel features [mels, frames] of whole windows."""

    def __init__(self, meta: VoxtralMeta, config: PreTrainedConfig, recompute: bool = False):
        Encoder.__init__(self, meta, VoxtralTower(whisper_config(config)), recompute, VoxtralProjector(meta))
        self.unused = ("tower.embed_positions.weight",)
