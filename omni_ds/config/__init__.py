"""The JSON a user edits: schema, loading, resolving, and what DeepSpeed's engines see of it."""

from omni_ds.config.data import DataConfig, EvalConfig, EvalSet, SourceConfig
from omni_ds.config.omni import (
    Balance,
    CheckpointConfig,
    EncoderParallel,
    ExportConfig,
    OmniConfig,
    TrainConfig,
)
from omni_ds.config.optimizer import base_lr, optimizer_spec
from omni_ds.config.parts import EncoderConfig, ModelConfig, PartConfig, ProcessorConfig, ProjectorConfig
from omni_ds.config.root import Config
from omni_ds.config.scheduler import scheduler_params

__all__ = [
    "Balance",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EncoderConfig",
    "EncoderParallel",
    "EvalConfig",
    "EvalSet",
    "ExportConfig",
    "ModelConfig",
    "OmniConfig",
    "PartConfig",
    "ProcessorConfig",
    "ProjectorConfig",
    "SourceConfig",
    "TrainConfig",
    "base_lr",
    "optimizer_spec",
    "scheduler_params",
]
