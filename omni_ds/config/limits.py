"""What the configuration can say already and the code cannot do yet. A later feature removes its lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from omni_ds.errors import UserError

if TYPE_CHECKING:
    from omni_ds.config.root import Config

VIDEO_OPTIONS = (
    "fps", "min_frames", "max_frames", "video_min_pixels", "video_max_pixels", "video_total_pixels",
)  # fmt: skip
"""Keys of `omni.encoders.<name>.processor` for towers that take video."""


def refuse_unsupported(config: Config) -> None:
    """UserError that names everything that is not supported yet, why, and what to use."""
    messages = list(_unsupported(config))
    if messages:
        raise UserError("\n".join(messages))


def _unsupported(config: Config) -> Iterator[str]:
    omni = config.omni
    if omni.model is None:  # what a whole checkpoint takes is known when it is read
        yield from _encoders(config)
    yield from _llm_memory(config)
    for name, source in omni.eval.sets.items():
        if source.metric == "wer":
            yield (
                f"omni.eval.sets.{name}.metric: wer is not supported yet: it needs freely generated text; "
                f"use exact_match or loss, and compute the word error rate with the exported model"
            )


def _encoders(config: Config) -> Iterator[str]:
    first: dict[str, str] = {}
    for name, encoder in config.omni.encoders.items():
        key = f"omni.encoders.{name}"
        if encoder.modality == "video":
            yield (
                f"{key}.modality: video is not supported yet: only checkpoints (omni.model) take it; use "
                f"image, with single frames"
            )
            continue
        for option in VIDEO_OPTIONS:
            if getattr(encoder.processor, option) is not None:
                yield (
                    f"{key}.processor.{option}: only checkpoints (omni.model) take video; use images, and "
                    f"remove it"
                )
        if encoder.modality in first:
            yield (
                f"{key}.modality: a second {encoder.modality} encoder is not supported yet: the media of a "
                f"sample would not say which of {first[encoder.modality]} and {name} they are for; use one "
                f"of them"
            )
        elif encoder.modality is not None:
            first[encoder.modality] = name


def _llm_memory(config: Config) -> Iterator[str]:
    checkpointing = config.activation_checkpointing
    if checkpointing is not None:
        for option, value in checkpointing.model_dump().items():
            if value is True:
                yield (
                    f"activation_checkpointing.{option} is not supported yet: activations are recomputed, "
                    f"not moved; use pipeline.activation_checkpoint_interval, and remove it"
                )
        if checkpointing.number_checkpoints is not None:
            yield (
                "activation_checkpointing.number_checkpoints is not supported yet: each layer is recomputed; "
                "use pipeline.activation_checkpoint_interval for layers recomputed at once, and remove it"
            )
