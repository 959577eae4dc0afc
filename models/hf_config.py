"""HF configs of the parts, from a checkpoint or inline, with errors a user can act on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig, PreTrainedConfig

from models.decoders import FAMILIES, find_family
from omni_ds.errors import UserError
from omni_ds.plan.encoder_geometry import SUPPORTED, tower_config


def load_hf_config(part: Any, kind: Literal["llm", "encoder"], where: str = "") -> PreTrainedConfig:
    """Config of a part (``omni_ds.config.PartConfig``): of the LLM, or of the tower inside a checkpoint.

    A path is a local folder or a repository of the hub (its cache alone when HF_HUB_OFFLINE is set).
    ``where`` names the config section in errors. UserError when it is missing, malformed or of an unsupported
    architecture.
    """
    where = where or ("omni.llm" if kind == "llm" else "omni.encoders")
    config = (
        read_config(part.path, part.trust_remote_code, where) if part.path else _from_dict(part.config, where)
    )
    if kind == "llm":
        if find_family(config).causal_lm is None:
            raise UserError(
                f'{where}: model_type "{config.model_type}" is part of a multimodal model and no LLM of its '
                f"own; give the whole checkpoint as omni.model.path, or use one of {', '.join(FAMILIES)}"
            )
        return config
    model_type, _ = tower_config(config.to_dict())
    if model_type not in SUPPORTED:
        raise UserError(
            f'{where}: encoders of model_type "{config.model_type}" are not supported; '
            f"supported are {', '.join(SUPPORTED)}"
        )
    return config if model_type == config.model_type else config.vision_config


def read_config(path: str, trust_remote_code: bool, where: str) -> PreTrainedConfig:
    """config.json of a local folder or a repository of the hub; UserError with ``where`` when there is
    none."""
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"{where}.path: {path} has no config.json; name the folder of an HF checkpoint")
    if not folder.is_dir() and (folder.is_absolute() or path.startswith(".") or path.count("/") > 1):
        raise UserError(f"{where}.path: there is no folder {path}")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{where}.path: no HF config could be read from {path}: {_first_line(error)}. Check the "
            f"name, and that the checkpoint is on this machine or that the hub can be reached"
        ) from error


def _from_dict(config: dict[str, Any], where: str) -> PreTrainedConfig:
    values = dict(config)
    model_type = values.pop("model_type", None)
    if not model_type:
        known = ", ".join(FAMILIES if where == "omni.llm" else SUPPORTED)
        raise UserError(f'{where}.config has no "model_type"; supported are {known}')
    try:
        return AutoConfig.for_model(model_type, **values)
    except Exception as error:  # transformers validates configs with several exception types of its own
        raise UserError(f"{where}.config is not a valid {model_type} config: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
