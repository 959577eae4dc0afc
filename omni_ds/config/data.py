"""`omni.data` and `omni.eval`: which samples, and how they become batches."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from omni_ds.config.base import NonNegativeInt, PositiveFloat, PositiveInt, Section


class SourceConfig(Section):
    """A set of samples."""

    path: str
    """File (`.json`, `.jsonl`, `.parquet`), folder, or hub name of a data set."""
    split: str = "train"
    """Split of a data set on the hub or in a folder."""
    name: str | None = None
    """Configuration name of a data set on the hub."""
    media_dir: str | None = None
    """Folder that relative media paths start from; null: the data file's folder."""
    columns: dict[str, str] | None = None
    """Which of the set's columns is which of ours, for example `{"audio": "audios", "text": "response"}`."""
    query: str | None = None
    """User message for sets that have only media and an answer, for example `<audio>Transcribe.`"""
    weight: PositiveFloat = 1.0
    """Share of the training samples drawn from this set, relative to the other sets. When all weights are
    equal the sets are joined and every sample is drawn once an epoch."""
    max_samples: PositiveInt | None = None
    """Use only the first so many samples."""


class EvalSet(SourceConfig):
    """A set of samples for evaluation, each used once (`weight` has no meaning here)."""

    metric: Literal["loss", "exact_match", "wer"] = "loss"
    """loss, or exact_match: the share of samples whose every target token is the argmax (what greedy decoding
    would have produced); loss is reported with it. wer is not supported yet."""


def _as_list(value: Any) -> Any:
    """A bare string or object stands for a list of one; a bare string for its path."""
    sources = value if isinstance(value, list) else [value]
    return [{"path": source} if isinstance(source, str) else source for source in sources]


Sources = Annotated[
    list[SourceConfig],
    BeforeValidator(_as_list, json_schema_input_type=str | SourceConfig | list[str | SourceConfig]),
    Field(min_length=1),
]


class DataConfig(Section):
    """The training samples."""

    train: Sources
    """One or more sets: a path, an object, or a list of them."""
    chat_template: str | None = None
    """Jinja chat template, inline or as a file; null: the tokenizer's."""
    chat_template_kwargs: dict[str, Any] = {}
    """Passed to the template, for example `{"enable_thinking": false}`."""
    loss_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Which tokens are targets: those of every assistant message, of the last one, or all."""
    use_audio_in_video: bool = False
    """Video: the sound of a file goes to the audio encoder, and its features stand among those of the frames.
    For models made for it (Qwen2.5-Omni, Qwen3-Omni)."""
    max_length: PositiveInt = 2048
    """Longest sample in tokens, media included. A longer one cannot be used (see `on_error`)."""
    max_tokens_per_micro_batch: PositiveInt = 8192
    """Token budget of a micro-batch, into which whole samples are packed."""
    num_workers: NonNegativeInt = 2
    """Loader processes per rank; 0 loads in the training process."""
    prefetch_steps: PositiveInt = 2
    """Steps prepared ahead by each loader process."""
    on_error: Literal["skip", "raise"] = "skip"
    """What to do with a sample that cannot be used: count and skip it, or stop."""
    max_skip_fraction: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Stop when more than this share of the samples was skipped."""
    cache_dir: str | None = None
    """Folder for what is made of the sets once and kept between runs, such as the index of the samples;
    null: `.omni_cache` beside each set, or `~/.cache/omni_ds` where that cannot be written."""


class EvalConfig(Section):
    """Evaluation on held-out sets."""

    every: PositiveInt | None = None
    """Evaluate every so many steps, and at the end; null: only at the end."""
    sets: dict[str, EvalSet] = {}
    """Held-out sets by name."""
