"""`omni.llm`, `omni.encoders.<name>` and what belongs to an encoder."""

from typing import Any, Literal

from omni_ds.config.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section


class ModelConfig(Section):
    """A whole HF multimodal checkpoint, whose parts are found in it."""

    path: str
    """Folder or hub name of the checkpoint."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""


class PartConfig(Section):
    """A model that is loaded (`path`) or made (`config`), and how it is trained."""

    path: str | None = None
    """Folder or hub name of an HF checkpoint (safetensors). Either `path` or `config`."""
    config: dict[str, Any] | None = None
    """Inline HF configuration (`model_type`, sizes): fresh weights, seeded by parameter name."""
    freeze: bool = False
    """Do not train this part. An encoder's `freeze` does not include its projector."""
    lr: NonNegativeFloat | None = None
    """Learning rate of this part; null: the optimizer's."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""


class LLMConfig(PartConfig):
    """The language model: an HF decoder."""

    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; null: the one in `path`."""


class ProcessorConfig(Section):
    """How media become the encoder's input."""

    max_seconds: PositiveFloat = 30.0
    """Audio: a longer clip cannot be used (see `omni.data.on_error`)."""
    pad_to_window: bool = False
    """Audio: pad every clip with silence to whole encoder windows, as HF does, instead of encoding its own
    duration."""
    sampling_rate: PositiveInt | None = None
    """Audio: samples per second the encoder expects; null: the checkpoint's, else 16000."""
    min_pixels: PositiveInt | None = None
    """Image: with this or `max_pixels`, images keep their proportions, in whole blocks of patch x
    `projector.factor`; a smaller one is enlarged to at least so many pixels. Null with `max_pixels` null: one
    size for all, that of the checkpoint (SigLIP2 NaFlex: its own number of patches)."""
    max_pixels: PositiveInt | None = None
    """Image: a larger one is reduced to at most so many pixels, its proportions kept; at least one block.
    Null with `min_pixels` set: no bound."""
    fps: PositiveFloat | None = None
    """Video: frames taken per second, evenly; null: the checkpoint's, else 2."""
    min_frames: PositiveInt | None = None
    """Video: at least this many frames, as far as it has them; null: the checkpoint's, else 4."""
    max_frames: PositiveInt | None = None
    """Video: at most this many frames; null: the checkpoint's, else 768."""
    video_min_pixels: PositiveInt | None = None
    """Video: pixels of a frame at least; null: `min_pixels`, else the checkpoint's."""
    video_max_pixels: PositiveInt | None = None
    """Video: pixels of a frame at most; null: `max_pixels`, else the checkpoint's."""
    video_total_pixels: PositiveInt | None = None
    """Video: pixels of all frames at most, frames that one patch joins counted once; longer videos get
    smaller
    frames, down to 1.05 times the least. Null: the checkpoint's cap if it sets one, else no bound."""


class ProjectorConfig(Section):
    """The layers that turn encoder output into rows of the LLM's width."""

    type: Literal["mlp", "gemma3"] = "mlp"
    """mlp: linear, GELU, linear. gemma3: means of factor x factor patches, norm, linear; Gemma3 checkpoints
    alone have it."""
    reduction: Literal["none", "pixel_shuffle", "frame_stack"] = "none"
    """How neighbouring rows are joined before the mlp: pixel_shuffle joins factor x factor patches of an
    image, frame_stack joins factor frames of a clip."""
    factor: PositiveInt = 1
    """Side of the joined square of patches, or number of joined frames."""
    hidden_size: PositiveInt | None = None
    """Width between the two linear layers; null: the LLM's width."""
    freeze: bool = False
    """Do not train the projector."""
    lr: NonNegativeFloat | None = None
    """Learning rate of the projector; null: the optimizer's."""


class EncoderConfig(PartConfig):
    """An encoder tower with its processor and its projector."""

    modality: Literal["image", "audio", "video"] | None = None
    """Which media it encodes. Needed unless `omni.model` says so."""
    processor: ProcessorConfig = ProcessorConfig()
    """How media become the encoder's input."""
    projector: ProjectorConfig = ProjectorConfig()
    """The layers between the tower and the LLM."""
    feature_layer: int | None = None
    """Image: which of the tower's hidden states are the features, counted as in HF LLaVA's
    `vision_feature_layer`; null: the default of the encoder's family."""
    feature_select: Literal["patch", "full"] | None = None
    """Image: patch drops the class token, full keeps it; null: patch where the tower has one."""
    placeholder: str | None = None
    """Special token that stands for one feature row in the text; null: the tokenizer's own for the
    modality, else `<image>` or `<audio>`, which is then added."""
