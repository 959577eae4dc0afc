"""HF export of a trained composition: what rank 0 does after every rank has written its shards.

writer = ShardWriter(out_dir, f"rank{rank:05d}", config.omni.export.max_shard_size, dtype_of)
for name, tensor in my_parameters:        # global names; each tensor on exactly one rank
    writer.add(name, tensor)
manifests = gather(writer.close())        # to rank 0
if rank == 0:
    finish_export(out_dir, manifests, parts)
"""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from omni_ds.checkpoint.export_config import Layout, plan_layout
from omni_ds.checkpoint.export_processor import media_processor, save_processor
from omni_ds.checkpoint.export_shards import Manifest, ShardWriter, place_shards
from omni_ds.checkpoint.export_target import check_export_target, clear_leftovers, publish, staging_folder
from omni_ds.checkpoint.export_template import end_of_turn_ids
from omni_ds.config import Config
from omni_ds.errors import UserError

__all__ = ["ExportParts", "ShardWriter", "check_export_target", "finish_export"]

_CODE = (
    "configuration_omni.py",
    "encoders_omni.py",
    "media_omni.py",
    "modeling_omni.py",
    "processing_omni.py",
)


@dataclass(frozen=True)
class ExportParts:
    """Everything of an export but the weights.

    config: as resolved. llm_config: HF config of the language model. encoder_configs, processors,
    placeholders: by encoder name, the HF config (of the tower or the checkpoint it is part of), what turns
    media into its input (an HF image processor or feature extractor, or the `Preprocess` around it), and the
    token id that stands for one feature row. chat_template: Jinja source; None means the tokenizer's own.
    """

    config: Config
    llm_config: PretrainedConfig
    encoder_configs: Mapping[str, PretrainedConfig]
    tokenizer: PreTrainedTokenizerBase
    processors: Mapping[str, Any]
    chat_template: str | None
    placeholders: Mapping[str, int]
    generation_config: GenerationConfig | None = None


def finish_export(out_dir: str | Path, manifests: Sequence[Manifest], parts: ExportParts) -> Path:
    """Turns the shards written under `out_dir` into a folder that transformers loads; returns its path.

    Args:
        out_dir: as given to every `ShardWriter`.
        manifests: what their `close` returned, in rank order.

    Raises UserError when tensors are missing, unexpected or of another size than the exported class wants,
    and when the folder cannot be written. The folder appears under its name at the very end.
    """
    staging = staging_folder(out_dir)
    layout = plan_layout(
        parts.config,
        parts.llm_config,
        parts.encoder_configs,
        parts.placeholders,
        {name: media_processor(parts.processors, name) for name in parts.config.omni.encoders},
    )
    _check_tensors(staging, manifests, layout)
    try:
        clear_leftovers(out_dir, keep={file for manifest in manifests for file, _ in manifest})
        files = place_shards(staging, manifests, layout.rename)
        layout.config.dtype = _main_dtype(staging, files)
        layout.config.save_pretrained(staging)
        _generation_config(parts).save_pretrained(staging)
        save_processor(staging, layout, parts)
        if layout.kind == "composed":
            for name in _CODE:
                shutil.copyfile(Path(__file__).parent / "hf_code" / name, staging / name)
        publish(out_dir)
    except OSError as error:
        raise UserError(
            f"export to {out_dir}: {error.strerror or error}; free space or name another folder"
        ) from error
    return Path(out_dir)


def _check_tensors(staging: Path, manifests: Sequence[Manifest], layout: Layout) -> None:
    """Every parameter of the exported class is there once, in its shape, and nothing else."""
    found: dict[str, tuple[int, ...]] = {}
    counts: Counter[str] = Counter()
    for file, sizes in (shard for manifest in manifests for shard in manifest):
        with safe_open(staging / file, "pt") as tensors:
            for name in sizes:
                found[layout.rename(name)] = tuple(tensors.get_slice(name).get_shape())
        counts.update(layout.rename(name) for name in sizes)
    problems = {
        "missing": sorted(layout.shapes.keys() - found.keys()),
        "unexpected": sorted(found.keys() - layout.shapes.keys()),
        "written twice": sorted(name for name, count in counts.items() if count > 1),
        "mis-shaped": [
            f"{name} {found[name]} instead of {shape}"
            for name, shape in layout.shapes.items()
            if name in found and found[name] != shape
        ],
    }
    lines = [f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names]
    if lines:
        raise UserError(
            f"export: the tensors do not make a {layout.config.architectures[0]}. " + "; ".join(lines)
        )


def _main_dtype(staging: Path, files: Sequence[str]) -> str:
    """The dtype most floating point values are stored in, for config.json."""
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
    counts: Counter[str] = Counter()
    for file in (file for file in files if file.endswith(".safetensors")):
        with safe_open(staging / file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                piece = tensors.get_slice(name)
                size = 1
                for extent in piece.get_shape():
                    size *= extent
                counts[names.get(piece.get_dtype(), "")] += size
    counts.pop("", None)
    return counts.most_common(1)[0][0]


def _generation_config(parts: ExportParts) -> GenerationConfig:
    """As given, or greedy; tokens it does not name are the tokenizer's and the template's end of turn."""
    config = copy.deepcopy(parts.generation_config) or GenerationConfig()
    if config.eos_token_id is None:
        config.eos_token_id = end_of_turn_ids(
            parts.tokenizer, parts.chat_template or parts.tokenizer.chat_template
        )
    for key in ("bos_token_id", "pad_token_id"):
        if getattr(config, key) is None:
            setattr(config, key, getattr(parts.tokenizer, key, None))
    if config.pad_token_id is None and config.eos_token_id:
        config.pad_token_id = (
            config.eos_token_id[-1] if isinstance(config.eos_token_id, list) else config.eos_token_id
        )
    return config
