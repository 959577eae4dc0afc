"""Voxtral: what its audio tower is fed, and the projector that is built."""

from __future__ import annotations

from transformers import PreTrainedConfig

from models.families.base import Section
from omni_ds.errors import UserError
from omni_ds.plan.towers.voxtral import joined_tokens

WHERE = "omni.model.path"


def voxtral_sections(config: PreTrainedConfig) -> dict[str, Section]:
    """What config.json says in our words; UserError for a tower or a projector that is not built."""
    audio = config.audio_config
    if config.projector_hidden_act != "gelu" or audio.activation_function != "gelu":
        raise UserError(
            f"{WHERE}: Voxtral with {config.projector_hidden_act} in the projector and "
            f"{audio.activation_function} in the tower is not supported; both have gelu"
        )
    if audio.scale_embedding:
        raise UserError(f"{WHERE}: an audio tower with scale_embedding is not supported")
    return {
        "audio": {
            "processor": {"pad_to_window": True},
            "projector": {"reduction": "frame_stack", "factor": joined_tokens(audio.to_dict())},
        }
    }
