"""Export of a checkpoint that came in whole (``omni.model``): the tensors and files it had, with new weights.

Tensors keep their names and dtypes, those nothing was made of are copied, and so is every other file of the
folder. Only what the user asked for differs: ``omni.export.dtype`` and a chat template of his own.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from models.checkpoint_files import side_files
from models.multimodal import Multimodal
from omni_ds.checkpoint.export_shards import Manifest, ShardWriter, place_shards
from omni_ds.checkpoint.export_target import clear_leftovers, publish, staging_folder
from omni_ds.config import Config
from omni_ds.errors import UserError


def write_unused(writer: ShardWriter, model: Multimodal, encoder_names: Collection[str]) -> None:
    """Add the checkpoint's tensors that no parameter was made of, as they are. On one rank."""
    for name in model.unused(encoder_names):
        writer.add(name, model.source.read(name))


def finish_model_export(
    out_dir: str | Path, manifests: Sequence[Manifest], model: Multimodal, config: Config
) -> Path:
    """Turn the shards under ``out_dir`` into the folder; returns its path.

    Args:
        manifests: what the writers' ``close`` returned, in rank order; names are those of the checkpoint.

    Raises:
        UserError: a tensor is missing, was written twice or should not be there, or the folder cannot be
            written. The folder appears under its name at the very end.
    """
    staging = staging_folder(out_dir)
    _check_names(manifests, model)
    try:
        clear_leftovers(out_dir, keep={file for manifest in manifests for file, _ in manifest})
        place_shards(staging, manifests, lambda name: name)
        for path in side_files(model.path, model.family.files):
            shutil.copyfile(path, staging / path.name)
        _apply_changes(staging, config)
        publish(out_dir)
    except OSError as error:
        raise UserError(
            f"export to {out_dir}: {error.strerror or error}; free space or name another folder"
        ) from error
    return Path(out_dir)


def _check_names(manifests: Sequence[Manifest], model: Multimodal) -> None:
    written = Counter(name for manifest in manifests for _, sizes in manifest for name in sizes)
    wanted = set(model.source.names())
    problems = {
        "missing": sorted(wanted - written.keys()),
        "unexpected": sorted(written.keys() - wanted),
        "written twice": sorted(name for name, count in written.items() if count > 1),
    }
    lines = [f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names]
    if lines:
        raise UserError(f"export: the tensors are not those of {model.path}. " + "; ".join(lines))


def _apply_changes(folder: Path, config: Config) -> None:
    """What the configuration changes in files that are copied otherwise."""
    if config.omni.export.dtype is not None:
        file = folder / "config.json"
        values = json.loads(file.read_text())
        key = "torch_dtype" if "torch_dtype" in values else "dtype"
        values[key] = config.omni.export.dtype
        for part in (value for value in values.values() if isinstance(value, dict)):
            part.update(dict.fromkeys({"dtype", "torch_dtype"} & part.keys(), values[key]))
        file.write_text(json.dumps(values, indent=2) + "\n")
    if (template := config.omni.data.chat_template) is not None:
        inline = "{%" in template or "{{" in template
        (folder / "chat_template.jinja").write_text(
            template if inline else Path(template).expanduser().read_text()
        )
