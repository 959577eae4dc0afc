"""Names and places of a checkpoint.

    checkpoints/
      latest                     one line: the newest complete tag; written last, atomically
      step-00000100/
        index.json               what is where, step, schedules, data position, fingerprint, file sizes
        llm-00000.safetensors    fragments of rank 0, one 1-D fp32 tensor each
        encoders-00000.safetensors

A parameter is looked at as a matrix [first dimension, all others] (``omni_ds/plan/region.py``). A fragment
is a range of a flattened rectangle of it, stored as ``<global name>|<rows>|<columns>|<offset>|<key>``:
``rows`` and ``columns`` are ``start:stop`` of the rectangle, ``offset`` counts its elements row by row,
``key`` is ``weight`` (the fp32 master) or an optimizer state. ``index.json`` lists the fragments of every
parameter. Every element is stored once, whoever holds copies; nothing depends on how many ranks wrote it or
how they shared the model, and nothing is unpickled.
"""

import json
import os
import shutil
from pathlib import Path

from omni_ds.checkpoint.overlap import Piece
from omni_ds.errors import UserError

FORMAT = 2  # 1 had no rectangles: whole parameters were cut into ranges
INDEX = "index.json"
LATEST = "latest"


def tag_of(step: int) -> str:
    return f"step-{step:08d}"


def fragment_key(name: str, piece: Piece, key: str) -> str:
    """Name of a stored tensor."""
    (top, bottom), (left, right) = piece.region.rows, piece.region.columns
    return f"{name}|{top}:{bottom}|{left}:{right}|{piece.offset}|{key}"


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` so that a reader sees the old or the new file, never a part of it."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_index(folder: Path) -> dict:
    """The index of one checkpoint.

    Raises:
        UserError: no index, an unreadable one, one of another format version, or a file it lists is
            missing or cut short.
    """
    try:
        index = json.loads((folder / INDEX).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is not a complete checkpoint ({error}); resume from another one") from None
    found = index.get("format") if isinstance(index, dict) else None
    if found != FORMAT:
        raise UserError(
            f"{folder} has checkpoint format {found}, this version reads {FORMAT}; "
            "resume with the version that wrote it"
        )
    for name, size in index.get("files", {}).items():
        there = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if there != size:
            raise UserError(
                f"{folder} is not a complete checkpoint ({name} has {there} of {size} bytes); "
                "resume from another one"
            )
    return index


def latest_tag(root: Path) -> str | None:
    """The newest complete checkpoint under ``root``, or None.

    The one that ``latest`` names, or an older one where that is damaged.
    """
    try:
        newest = (root / LATEST).read_text().strip()
    except OSError:
        return None
    older = sorted(
        (path.name for path in root.glob("step-*") if path.suffix != ".tmp" and path.name < newest),
        reverse=True,
    )
    for tag in (newest, *older):
        try:
            read_index(root / tag)
        except UserError:
            continue
        return tag
    return None


def _complete(root: Path) -> list[Path]:
    found = (path for path in root.glob("step-*") if path.suffix != ".tmp" and (path / INDEX).is_file())
    return sorted(found)


def prune(root: Path, keep_last: int | None) -> None:
    """Delete all but the ``keep_last`` newest complete checkpoints, and what killed saves left."""
    if keep_last is None:
        return
    for path in _complete(root)[:-keep_last]:
        shutil.rmtree(path, ignore_errors=True)
    for path in root.glob("step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def set_aside_after(root: Path, step: int) -> list[Path]:
    """Rename checkpoints of later steps: they belong to a run that this one does not continue.

    A run that starts at ``step`` calls this first; otherwise its own checkpoints would count as older ones.
    Returns the new names; nothing is deleted.
    """
    moved = []
    for path in _complete(root):
        if path.name > tag_of(step):
            target = path.with_name("abandoned-" + path.name)
            number = 1
            while target.exists():
                target = path.with_name(f"abandoned-{path.name}-{number}")
                number += 1
            path.rename(target)
            moved.append(target)
    return moved
