"""The JSON a user edits: schema, loading, resolving, and what DeepSpeed's engines see of it.

Imports neither torch nor transformers, so that a wrong key is reported at once.
"""

from omni_ds.config.data import DataConfig, EvalConfig, EvalSet, SourceConfig
from omni_ds.config.engines import encoder_engine_config, llm_engine_config, monitor_config
from omni_ds.config.hardware import HardwareConfig
from omni_ds.config.load import apply_overrides, load_config, parse_config, validate
from omni_ds.config.omni import (
    Balance,
    CheckpointConfig,
    EncoderParallel,
    ExportConfig,
    OmniConfig,
    TrainConfig,
)
from omni_ds.config.optimizer import base_lr, optimizer_spec
from omni_ds.config.parts import (
    EncoderConfig,
    LLMConfig,
    ModelConfig,
    PartConfig,
    ProcessorConfig,
    ProjectorConfig,
)
from omni_ds.config.resolve import epoch_steps, resolve, total_steps
from omni_ds.config.root import Config
from omni_ds.config.scheduler import scheduler_params
from omni_ds.config.schema import describe_schema

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
    "HardwareConfig",
    "LLMConfig",
    "ModelConfig",
    "OmniConfig",
    "PartConfig",
    "ProcessorConfig",
    "ProjectorConfig",
    "SourceConfig",
    "TrainConfig",
    "apply_overrides",
    "base_lr",
    "describe_schema",
    "encoder_engine_config",
    "epoch_steps",
    "llm_engine_config",
    "load_config",
    "monitor_config",
    "optimizer_spec",
    "parse_config",
    "resolve",
    "scheduler_params",
    "total_steps",
    "validate",
]
