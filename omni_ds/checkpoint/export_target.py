"""The folder of an HF export: may it be written, and how it appears all at once.

An export is built in a hidden folder beside its target and renamed when it is complete, so the target never
holds half a model. What an export wrote is listed in `omni_export.json` inside it; only a folder whose every
file is in that list is replaced.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from omni_ds.errors import UserError

MARKER = "omni_export.json"


def staging_folder(out_dir: str | Path) -> Path:
    """Where the export to `out_dir` is built: the same path on every rank, on the same file system."""
    target = _resolve(out_dir)
    return target.parent / f".{target.name}.export-partial"


def check_export_target(out_dir: str | Path) -> None:
    """UserError unless `out_dir` can be written and is absent, empty or an earlier export alone."""
    target = _resolve(out_dir)
    try:
        if target.exists() and not target.is_dir():
            raise UserError(f"export to {out_dir}: there is a file of this name; name another folder")
        foreign = _foreign_files(target) if target.is_dir() else []
    except OSError as error:
        raise UserError(f"export to {out_dir}: {error.strerror or error}; name another folder") from error
    if foreign:
        names = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise UserError(
            f"export to {out_dir}: the folder holds {len(foreign)} file(s) that no earlier export wrote "
            f"({names}); empty it or name another folder"
        )
    existing = target.parent
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"export to {out_dir}: no permission to write in {existing}; change it or name another folder"
        )


def clear_leftovers(out_dir: str | Path, keep: Collection[str]) -> None:
    """Removes what a killed export left in the staging folder: everything but the files named in `keep`."""
    staging = staging_folder(out_dir)
    for path in staging.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in keep:
            path.unlink()


def publish(out_dir: str | Path) -> None:
    """Writes the marker and puts the staging folder in the place of `out_dir`.

    An earlier export is moved aside first and deleted after the new one stands.
    """
    check_export_target(out_dir)
    target, staging = _resolve(out_dir), staging_folder(out_dir)
    files = sorted(path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file())
    (staging / MARKER).write_text(json.dumps({"format": 1, "files": files}, indent=2) + "\n")
    replaced = target.parent / f".{target.name}.export-replaced"
    shutil.rmtree(replaced, ignore_errors=True)
    if target.is_dir():
        target.rename(replaced)
    staging.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


def _resolve(out_dir: str | Path) -> Path:
    return Path(os.path.abspath(os.path.realpath(out_dir)))


def _foreign_files(target: Path) -> list[str]:
    """Files under `target` (relative, sorted) that its marker does not list; `__pycache__` is nobody's."""
    marker = target / MARKER
    try:
        listed = set(json.loads(marker.read_text())["files"]) | {MARKER} if marker.is_file() else set()
    except (ValueError, KeyError, TypeError):
        listed = set()
    found = (path for path in target.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(name for path in found if (name := path.relative_to(target).as_posix()) not in listed)
