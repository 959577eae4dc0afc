"""What a family of HF multimodal models has to say for itself; the rest is found in config and modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from omni_ds.plan.clock import Clock

Section = dict[str, Any]


def no_sections(config: PreTrainedConfig) -> dict[str, Section]:
    return {}


def as_written(config: PreTrainedConfig, tokenizer: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class ModelFamily:
    """A line of the table.

    model_class: name of the HF class in transformers. sections: config of a checkpoint -> for a tower's name,
    the keys of ``omni.encoders.<name>`` that the checkpoint decides; UserError when it asks for what cannot
    be built. towers: config of a checkpoint -> for a tower's name, what it says of the tower outside the
    tower's own config, to which it is joined. grid_positions: tokens of images have positions in time, height
    and width (mrope). blocks: consecutive feature rows attend to each other in both directions. written:
    (config, tokenizer) -> what the chat template writes for a medium -> what HF's processor makes of it, with
    one placeholder; nothing where the template writes the placeholder itself. spelled: (config, tokenizer) ->
    modality -> (`data.planned.Planned`) -> text for the placeholder of a medium whose feature rows come in
    several equal runs, with a placeholder for each. inside: key of a larger model's config.json that holds
    the config of this one. unused: prefix of a tensor's name in the class, or in the checkpoint where the
    class has no such tensor -> why nothing is made of it. files: of a checkpoint, which look like weights,
    but are not: an export has them. clock: config -> how positions count the time of videos that may have
    sound.
    """

    model_class: str
    sections: Callable[[PreTrainedConfig], dict[str, Section]] = no_sections
    towers: Callable[[PreTrainedConfig], dict[str, Section]] = no_sections
    grid_positions: bool = False
    inside: str = ""
    blocks: bool = False
    written: Callable[[PreTrainedConfig, Any], dict[str, str]] = as_written
    spelled: Callable[[PreTrainedConfig, Any], dict[str, Callable[[Any], str]]] = as_written
    unused: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    clock: Callable[[PreTrainedConfig], Clock] | None = None
