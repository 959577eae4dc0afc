"""Qwen2.5-Omni and Qwen3-Omni: the thinker of a model that also speaks, and how its positions count time."""

from __future__ import annotations

from transformers import PreTrainedConfig

from omni_ds.errors import UserError
from omni_ds.plan.clock import Clock

SPEECH = "it makes the speech of an answer, which is not trained"


def in_chunks(config: PreTrainedConfig) -> Clock:
    """Of Qwen2.5-Omni: seconds_per_chunk of video, then its sound, take turns."""
    per_second = config.position_id_per_seconds
    return Clock(per_second, int(per_second * config.seconds_per_chunk), *_around(config))


def in_time(config: PreTrainedConfig) -> Clock:
    """Of Qwen3-Omni: each frame stands before the sound that follows it."""
    return Clock(config.position_id_per_seconds, 0, *_around(config))


def _around(config: PreTrainedConfig) -> tuple[int, int]:
    names = ("audio_start_token_id", "audio_end_token_id")
    found = tuple(getattr(config, name, None) for name in names)
    for name, value in zip(names, found, strict=True):
        if not isinstance(value, int):
            raise UserError(f"omni.model.path: config.json has no {name} in its thinker_config; add it")
    return found
