"""Where the index of a source is kept, and for which content of files and configuration it is valid."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data import index_layout
from data.sources import Source
from data.text import TextProcessor

VERSION = 3  # of the file format and of everything that decides its content
_LEARNING_ONLY = (
    "tower_trainable",
    "projector_trainable",
    "projector_hidden",
    "out_hidden",
    "tower_parameters",
)


def cache_folder(cache_dir: str | None, source: Source, fingerprint: str, blocks: int) -> Path | None:
    """Folder of the index: in `cache_dir`, else beside the data, else in the user's cache; None when none is
    writable. One that has all `blocks` is used where it is, writable or not.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omni_ds"
    beside = [source.folder / ".omni_cache"] if source.local else []
    parents = [Path(cache_dir).expanduser()] if cache_dir else [*beside, home]
    for parent in parents:
        folder = _latest(parent, fingerprint)
        if all((folder / index_layout.block_name(block)).is_file() for block in range(blocks)):
            return folder
    for parent in parents:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            if os.access(parent, os.W_OK):
                if not (parent / ".gitignore").exists():
                    (parent / ".gitignore").write_text("*\n")
                return _latest(parent, fingerprint)
        except OSError:
            continue
    return None


def next_edition(folder: Path) -> Path:
    """The folder for the same rows measured again. What others still read stays where it is."""
    return folder.with_name(f"{folder.name.partition('.')[0]}.{edition_of(folder) + 1}")


def edition_of(folder: Path) -> int:
    """How often the rows were measured again."""
    return int(folder.name.partition(".")[2] or 0)


def _latest(parent: Path, fingerprint: str) -> Path:
    folder = parent / fingerprint
    while next_edition(folder).is_dir():
        folder = next_edition(folder)
    return folder


def fingerprint(
    source: Source,
    reading: Any,
    text: TextProcessor,
    media: Mapping[str, Any],
    metas: Mapping[str, Any],
    limits: Any,
) -> str:
    """Hash of everything that decides the index. Media files themselves are not looked at."""
    tokenizer = text.tokenizer.backend_tokenizer.to_str()
    measured = {
        name: {key: value for key, value in asdict(meta).items() if key not in _LEARNING_ONLY}
        for name, meta in metas.items()
    }
    processors = {name: [p.processor.to_dict(), p.settings] for name, p in media.items()}
    parts = [
        VERSION, index_layout.BLOCK_ROWS, index_layout.MAX_BLOCKS, index_layout.CHUNK, source.fingerprint,
        type(text).__name__, reading, tokenizer, text.tokenizer.special_tokens_map, text.chat_template,
        text.chat_template_kwargs, text.loss_on, text.placeholders, processors, measured, limits,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:32]
