"""The index of one source on disk: numbers of every usable row, what was skipped, and when the file is still
valid.
"""

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.sources import Source
from data.text import TextProcessor

VERSION = 1  # of the file format and of everything that decides its content
_LEARNING_ONLY = (
    "tower_trainable",
    "projector_trainable",
    "projector_hidden",
    "out_hidden",
    "tower_parameters",
)


@dataclass(frozen=True)
class Skip:
    """A row that cannot be used. reason: what it is counted by; detail: its own case; media: a file is to
    blame.
    """

    row: int
    reason: str
    detail: str
    media: bool


@dataclass(frozen=True)
class Record:
    """Numbers of one usable row. items: (encoder, shape, token offset) by ordinal."""

    row: int
    tokens: int
    target_tokens: int
    task: str
    items: tuple[tuple[str, tuple[int, ...], int], ...]


@dataclass
class SourceIndex:
    """Columns over the usable rows of a source [n] and over their media [m].

    rows, tokens, target_tokens, tasks (numbers into task_names): [n]. item_starts: [n + 1], into the item
    columns item_encoders (numbers into encoder_names) [m], item_shapes [m, 2] (-1: no second side),
    item_offsets [m]. skipped: rows by reason; examples: the first skips of each reason; media_skips: rows
    skipped for their media.
    """

    rows: np.ndarray
    tokens: np.ndarray
    target_tokens: np.ndarray
    tasks: np.ndarray
    item_starts: np.ndarray
    item_encoders: np.ndarray
    item_shapes: np.ndarray
    item_offsets: np.ndarray
    media_skips: np.ndarray
    encoder_names: list[str]
    task_names: list[str]
    skipped: Counter[str] = field(default_factory=Counter)
    examples: list[Skip] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    def digest(self) -> str:
        """Hash of the numbers of all usable rows."""
        arrays = [value for name, value in sorted(vars(self).items()) if isinstance(value, np.ndarray)]
        hashed = hashlib.sha256(json.dumps([self.encoder_names, self.task_names]).encode())
        for array in arrays:
            hashed.update(np.ascontiguousarray(array).tobytes())
        return hashed.hexdigest()

    def items(self, index: int) -> list[tuple[str, tuple[int, ...], int]]:
        """(encoder, shape, token offset) of each medium of usable row number `index`."""
        span = range(self.item_starts[index], self.item_starts[index + 1])
        return [
            (
                self.encoder_names[self.item_encoders[i]],
                tuple(int(side) for side in self.item_shapes[i] if side >= 0),
                int(self.item_offsets[i]),
            )
            for i in span
        ]

    @classmethod
    def from_results(cls, results: Sequence[Record | Skip], encoder_names: Sequence[str]) -> "SourceIndex":
        records = [result for result in results if isinstance(result, Record)]
        skips = [result for result in results if isinstance(result, Skip)]
        items = [item for record in records for item in record.items]
        names, tasks = list(encoder_names), sorted({record.task for record in records})
        shapes = [(*shape, -1)[:2] for _, shape, _ in items]
        seen: Counter[str] = Counter()
        examples = []
        for skip in skips:
            seen[skip.reason] += 1
            if seen[skip.reason] <= 3:
                examples.append(skip)
        return cls(
            rows=np.array([record.row for record in records], dtype=np.int64),
            tokens=np.array([record.tokens for record in records], dtype=np.int32),
            target_tokens=np.array([record.target_tokens for record in records], dtype=np.int32),
            tasks=np.array([tasks.index(record.task) for record in records], dtype=np.int32),
            item_starts=np.cumsum([0] + [len(record.items) for record in records], dtype=np.int64),
            item_encoders=np.array([names.index(encoder) for encoder, _, _ in items], dtype=np.int16),
            item_shapes=np.array(shapes, dtype=np.int32).reshape(-1, 2),
            item_offsets=np.array([offset for _, _, offset in items], dtype=np.int32),
            media_skips=np.array([skip.row for skip in skips if skip.media], dtype=np.int64),
            encoder_names=names,
            task_names=tasks,
            skipped=seen,
            examples=examples,
        )

    def save(self, path: Path) -> None:
        """Appears whole or not at all."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        words = json.dumps({
            "encoder_names": self.encoder_names,
            "task_names": self.task_names,
            "skipped": self.skipped,
            "examples": [asdict(skip) for skip in self.examples],
        })  # fmt: skip
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        with os.fdopen(handle, "wb") as file:
            np.savez(file, words=np.frombuffer(words.encode(), dtype=np.uint8), **arrays)
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: Path) -> "SourceIndex":
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        words = json.loads(arrays.pop("words").tobytes())
        words["skipped"] = Counter(words["skipped"])
        words["examples"] = [Skip(**skip) for skip in words["examples"]]
        return cls(**arrays, **words)


def cache_path(cache_dir: str | None, source: Source, fingerprint: str) -> Path | None:
    """File of the index: in `cache_dir`, else beside the data, else in the user's cache; None when none is
    writable.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omni_ds"
    beside = [source.folder / ".omni_cache"] if source.local else []
    folders = [Path(cache_dir).expanduser()] if cache_dir else [*beside, home]
    for folder in folders:
        if (folder / f"{fingerprint}.npz").is_file():
            return folder / f"{fingerprint}.npz"
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                if not (folder / ".gitignore").exists():
                    (folder / ".gitignore").write_text("*\n")
                return folder / f"{fingerprint}.npz"
        except OSError:
            continue
    return None


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
    processors = {
        name: [
            p.processor.to_dict(),
            {k: v for k, v in vars(p).items() if k in ("max_seconds", "pad_to_window")},
        ]
        for name, p in media.items()
    }
    parts = [
        VERSION, source.fingerprint, reading, tokenizer, text.tokenizer.special_tokens_map,
        text.chat_template, text.chat_template_kwargs, text.loss_on, text.placeholders, processors, measured,
        limits,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:32]
