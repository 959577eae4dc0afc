"""Building encoders from the config, and all of them as the one module the encoder engine runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from models.encoders.base import Encoder, ItemSlice
from models.encoders.gemma3 import Gemma3VisionEncoder
from models.encoders.internvl import InternVLEncoder
from models.encoders.naflex import NaflexEncoder
from models.encoders.omni_audio import Qwen3OmniAudioEncoder, Qwen25OmniAudioEncoder
from models.encoders.onevision import OneVisionEncoder
from models.encoders.qwen3_vision import Qwen3VisionEncoder
from models.encoders.qwen_audio import QwenAudioEncoder
from models.encoders.qwen_vision import QwenVisionEncoder
from models.encoders.vit import VitEncoder
from models.encoders.voxtral import VoxtralEncoder
from models.encoders.whisper import WhisperEncoder
from models.freeze import set_trainable
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.image_size import NAFLEX
from omni_ds.plan.towers.gemma3 import Gemma3VisionMeta
from omni_ds.plan.towers.voxtral import VoxtralMeta

# By the class of its numbers, else by the model_type of the tower, else by its family.
_ENCODERS: dict[type[EncoderMeta] | str, type[Encoder]] = {
    Gemma3VisionMeta: Gemma3VisionEncoder,
    VoxtralMeta: VoxtralEncoder,
    NAFLEX: NaflexEncoder,
    "qwen3_omni_moe_audio_encoder": Qwen3OmniAudioEncoder,
    "vit": VitEncoder,
    "whisper": WhisperEncoder,
    "qwen_vision": QwenVisionEncoder,
    "qwen3_vision": Qwen3VisionEncoder,
    "qwen_audio": QwenAudioEncoder,
    "omni_audio": Qwen25OmniAudioEncoder,
    "onevision": OneVisionEncoder,
    "internvl": InternVLEncoder,
}


def build_encoder(
    name: str, encoder_config: Any, hf_config: PreTrainedConfig, llm_hidden: int, *, recompute: bool = False
) -> Encoder:
    """An encoder with untouched (default-initialised) weights, frozen as its config section says.

    ``encoder_config``: ``omni_ds.config.EncoderConfig``; ``hf_config``: from ``load_hf_config(part,
    "encoder")``. UserError when architecture or geometry is not supported.
    """
    meta = EncoderMeta.from_config(name, encoder_config, hf_config.to_dict(), llm_hidden)
    kind = next(key for key in (type(meta), meta.model_type, meta.family) if key in _ENCODERS)
    encoder = _ENCODERS[kind](meta, hf_config, recompute)
    set_trainable(encoder, tower=meta.tower_trainable, projector=meta.projector_trainable)
    return encoder


class RuntimeEncoders(nn.Module):
    """All encoders of a composition; its parameter names are the global ones (``encoders.<name>....``).

    ``width``: of a feature row (Plan.row_width); rows of an encoder with fewer levels end in zeros.
    """

    def __init__(self, encoders: Mapping[str, Encoder], width: int):
        super().__init__()
        self.encoders = nn.ModuleDict(encoders)
        self.width = width

    def hf_names(self) -> dict[str, str]:
        return {name: name for name, _ in self.named_parameters()}

    def constants(self) -> dict[str, Tensor]:
        """Local name -> value of parameters that do not start at random."""
        return {
            f"encoders.{name}.{local}": value
            for name, encoder in self.encoders.items()
            for local, value in encoder.constants().items()
        }

    @property
    def unused(self) -> tuple[str, ...]:
        return tuple(
            f"encoders.{name}.{x}" for name, encoder in self.encoders.items() for x in encoder.unused
        )

    def forward(
        self,
        batches: Mapping[str, Sequence[Tensor]],
        minimal: Sequence[str] = (),
        shapes: Mapping[str, Sequence[Sequence[int]]] | None = None,
    ) -> Tensor:
        """Feature rows [rows, width] of all items, encoders in config order, so that one tensor leaves the
        engine.

        shapes: of the items, as in ``Encoder.forward``. An encoder named in ``minimal`` that has no items
        runs its smallest item and adds no row: its parameters still enter forward and backward, with zero
        gradient. Without any work the result is [0, width].
        """
        outputs = []
        for name, encoder in self.encoders.items():
            if values := batches.get(name):
                outputs.append(self._padded(encoder(values, None if shapes is None else shapes[name])))
            elif name in minimal:
                parameter = next(encoder.projector.parameters())
                least = encoder.minimal_values(parameter.device, parameter.dtype)
                outputs.append(self._padded(encoder(least, [encoder.meta.minimal_shape()])[:0]))
        if outputs:
            return torch.cat(outputs)
        parameter = next(self.parameters())
        return torch.empty(0, self.width, device=parameter.device, dtype=parameter.dtype)

    def forward_slice(self, name: str, value: Tensor, part: ItemSlice) -> Tensor:
        """Feature rows [rows of the slice, width] (:meth:`Encoder.forward_slice`)."""
        return self._padded(self.encoders[name].forward_slice(value, part))

    def _padded(self, rows: Tensor) -> Tensor:
        missing = self.width - rows.shape[1]
        return nn.functional.pad(rows, (0, missing)) if missing else rows
