"""The section `omni`: everything that is not DeepSpeed's."""

import re
from typing import Annotated, Literal

from pydantic import Field

from omni_ds.config.base import Auto, PositiveFloat, PositiveInt, Section
from omni_ds.config.data import DataConfig, EvalConfig
from omni_ds.config.hardware import HardwareConfig
from omni_ds.config.parts import EncoderConfig, LLMConfig, ModelConfig

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*(KB|MB|GB|KiB|MiB|GiB)$")


class EncoderParallel(Section):
    """How the encoders are spread over the ranks."""

    placement: Literal["colocated", "first_stage"] = "colocated"
    """colocated: every rank encodes its share of every window; first_stage: only the ranks of the first
    pipeline stage encode (a baseline)."""
    first_stage_cut: Literal["even", "with_encoders"] = "even"
    """How the LLM's layers are cut into stages under placement first_stage: evenly, or so that stages are
    even with the encoders' work for the average sample counted on the first one."""
    zero_stage: Literal[1, 2, 3] = 2
    """ZeRO stage of the encoders, over all ranks."""
    long_short: Auto | Literal["off"] | PositiveInt = "auto"
    """Encode long media on several ranks, images in slices that attend to each other and recordings in parts:
    off, those of more than so many encoder tokens, or auto: where one would hold up the others. Images only
    with placement colocated, encoder ZeRO-1 or 2 and without class tokens among the features."""
    max_sp: PositiveInt = 8
    """At most so many ranks encode slices of one image together: neighbours of one stage, 2, 4, 8, ..."""
    recompute: Auto | bool = "auto"
    """Recompute the encoders' activations in their backward pass; auto: as
    `pipeline.activation_checkpoint_interval` says for the LLM. Towers keep more of long images than the LLM
    does, and cost less to run twice."""
    measured_times: bool = True
    """Place encoder work by times measured in a few steps instead of by FLOPs; changes no result."""


class Balance(Section):
    """How samples and media are dealt to the ranks."""

    mode: Literal["auto", "off"] = "auto"
    """auto: by cost; off: in order, as they come (a baseline). The training result is the same."""
    group_size: Auto | PositiveInt = "auto"
    """Number of data-parallel replicas whose samples may be exchanged."""


class TrainConfig(Section):
    """How long to train. One of `max_steps` and `num_train_epochs`."""

    max_steps: PositiveInt | None = None
    """Number of optimizer steps."""
    num_train_epochs: PositiveFloat | None = None
    """Number of passes over the training samples; may be a fraction."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Of fresh weights and of the order of the samples."""


class CheckpointConfig(Section):
    """Checkpoints for `--resume`."""

    every: PositiveInt | None = None
    """Save every so many steps; null: never."""
    keep_last: PositiveInt | None = None
    """Keep so many of the newest checkpoints; null: all."""


class ExportConfig(Section):
    """The HF folder written at the end."""

    at_end: bool = True
    """Export when training has finished (`--export DIR` exports at any time)."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the exported weights; null: the one they were imported in, float32 for fresh ones."""
    max_shard_size: Annotated[str, Field(pattern=_SIZE.pattern, examples=["5GB"])] = "5GB"
    """Largest safetensors file, in KB, MB, GB or KiB, MiB, GiB."""

    @property
    def max_shard_bytes(self) -> int:
        """`max_shard_size` in bytes."""
        number, unit = _SIZE.match(self.max_shard_size).groups()
        return int(float(number) * _UNITS[unit])


class OmniConfig(Section):
    """What is trained, on what, and what comes out."""

    model: ModelConfig | None = None
    """A whole HF multimodal checkpoint instead of parts."""
    llm: LLMConfig = LLMConfig()
    """The language model."""
    encoders: dict[str, EncoderConfig] = {}
    """Encoders by name; the name appears in parameter names, logs and `lr/<name>`."""
    encoder_parallel: EncoderParallel = EncoderParallel()
    """How the encoders are spread over the ranks."""
    balance: Balance = Balance()
    """How samples and media are dealt to the ranks."""
    hardware: HardwareConfig = HardwareConfig()
    """What the ranks run on: what `auto` degrees are chosen for."""
    data: DataConfig
    """The training samples."""
    train: TrainConfig
    """How long to train."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on held-out sets."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints for `--resume`."""
    export: ExportConfig = ExportConfig()
    """The HF folder written at the end."""
    output_dir: str
    """Folder of everything a run writes: resolved configuration, metrics, checkpoints, export."""
    trace: bool = False
    """Write a timeline of every rank's actions in the first ten steps (`--trace` names others)."""
