"""The index on disk: a block of rows as columns in one safetensors file, mapped into memory when read."""

import hashlib
import json
import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

_DTYPES = {
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "F64": np.float64,
}  # safetensors' names of those used here


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
class IndexedItem:
    """Numbers of one medium. spans: (token offset, feature rows) of each run of its placeholders. seconds,
    times: as in `Planned`."""

    encoder: str
    shape: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    seconds: float = 0.0
    times: tuple[float, ...] = ()


@dataclass(frozen=True)
class Record:
    """Numbers of one usable row. items: by ordinal."""

    row: int
    tokens: int
    target_tokens: int
    task: str
    items: tuple[IndexedItem, ...]


@dataclass
class IndexPart:
    """Columns over usable rows [n] of a source and over their media [m].

    rows, tokens, target_tokens, tasks (numbers into task_names): [n]. item_starts: [n + 1], into the item
    columns item_encoders (numbers into encoder_names) [m], item_shapes [m, 4] (-1: no such side),
    item_seconds [m]. span_starts, time_starts: [m + 1], into spans [s, 2] and times [t]. skipped: rows by
    reason; examples: the first skips of each reason; media_skips: rows skipped for their media. Arrays of a
    part that was read are views of the file and cannot be written.
    """

    rows: np.ndarray
    tokens: np.ndarray
    target_tokens: np.ndarray
    tasks: np.ndarray
    item_starts: np.ndarray
    item_encoders: np.ndarray
    item_shapes: np.ndarray
    item_seconds: np.ndarray
    span_starts: np.ndarray
    spans: np.ndarray
    time_starts: np.ndarray
    times: np.ndarray
    media_skips: np.ndarray
    encoder_names: list[str]
    task_names: list[str]
    skipped: Counter[str] = field(default_factory=Counter)
    examples: list[Skip] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    def digest(self) -> str:
        """Hash of the numbers of all usable rows."""
        hashed = hashlib.sha256(json.dumps([self.encoder_names, self.task_names]).encode())
        for _, array in sorted(self._arrays().items()):
            hashed.update(np.ascontiguousarray(array).tobytes())
        return hashed.hexdigest()

    def items(self, index: int) -> list[IndexedItem]:
        """Each medium of usable row number `index`."""
        start, stop = self.item_starts[index : index + 2].tolist()
        if start == stop:
            return []
        here = slice(start, stop)
        spans = _cut(self.spans, self.span_starts[start : stop + 1].tolist())
        times = _cut(self.times, self.time_starts[start : stop + 1].tolist())
        return [
            IndexedItem(
                self.encoder_names[encoder],
                tuple([side for side in shape if side >= 0]),
                tuple([(offset, length) for offset, length in places]),
                seconds,
                tuple(moments),
            )
            for encoder, shape, seconds, places, moments in zip(
                self.item_encoders[here].tolist(),
                self.item_shapes[here].tolist(),
                self.item_seconds[here].tolist(),
                spans,
                times,
                strict=True,
            )
        ]

    @classmethod
    def from_results(cls, results: Sequence[Record | Skip], encoder_names: Sequence[str]) -> "IndexPart":
        records = [result for result in results if isinstance(result, Record)]
        skips = [result for result in results if isinstance(result, Skip)]
        items = [item for record in records for item in record.items]
        names, tasks = list(encoder_names), sorted({record.task for record in records})
        numbers = {task: number for number, task in enumerate(tasks)}
        shapes = [(*item.shape, -1, -1, -1)[:4] for item in items]
        return cls(
            rows=np.array([record.row for record in records], dtype=np.int64),
            tokens=np.array([record.tokens for record in records], dtype=np.int32),
            target_tokens=np.array([record.target_tokens for record in records], dtype=np.int32),
            tasks=np.array([numbers[record.task] for record in records], dtype=np.int32),
            item_starts=_starts([record.items for record in records]),
            item_encoders=np.array([names.index(item.encoder) for item in items], dtype=np.int16),
            item_shapes=np.array(shapes, dtype=np.int32).reshape(-1, 4),
            item_seconds=np.array([item.seconds for item in items], dtype=np.float64),
            span_starts=_starts([item.spans for item in items]),
            spans=np.array([s for item in items for s in item.spans], dtype=np.int32).reshape(-1, 2),
            time_starts=_starts([item.times for item in items]),
            times=np.array([time for item in items for time in item.times], dtype=np.float64),
            media_skips=np.array([skip.row for skip in skips if skip.media], dtype=np.int64),
            encoder_names=names,
            task_names=tasks,
            skipped=Counter(skip.reason for skip in skips),
            examples=_first_of_each(skips),
        )

    @classmethod
    def joined(cls, parts: Sequence["IndexPart"]) -> "IndexPart":
        """The same as one part made from the results of all, in order. At least one part, of one source."""
        tasks = sorted({task for part in parts for task in part.task_names})
        numbers = {task: number for number, task in enumerate(tasks)}
        arrays = {
            name: np.concatenate([part._arrays()[name] for part in parts]) for name in _shared_columns()
        }
        renumbered = [
            np.array([numbers[task] for task in part.task_names], dtype=np.int32)[part.tasks]
            for part in parts
        ]
        return cls(
            **arrays,
            tasks=np.concatenate(renumbered),
            **{name: _joined_starts([getattr(part, name) for part in parts]) for name in _STARTS},
            encoder_names=parts[0].encoder_names,
            task_names=tasks,
            skipped=sum((part.skipped for part in parts), Counter()),
            examples=_first_of_each([skip for part in parts for skip in part.examples]),
        )

    def _arrays(self) -> dict[str, np.ndarray]:
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    def save(self, path: Path) -> None:
        """Appears whole or not at all."""
        from safetensors.numpy import save

        words = {
            "encoder_names": self.encoder_names,
            "task_names": self.task_names,
            "skipped": self.skipped,
            "examples": [asdict(skip) for skip in self.examples],
        }
        arrays = {name: np.ascontiguousarray(array) for name, array in self._arrays().items()}
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(save(arrays, {"words": json.dumps(words)}))
        os.chmod(temporary, 0o644)  # other users of the same data may read it
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: Path) -> "IndexPart":
        """Map a file; OSError, ValueError, KeyError or TypeError when it is absent or damaged."""
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        base = 8 + int.from_bytes(mapped[:8], "little")
        header = json.loads(mapped[8:base])
        words = json.loads(header.pop("__metadata__")["words"])
        if len(mapped) != base + max(entry["data_offsets"][1] for entry in header.values()):
            raise ValueError(f"{path} is not whole")
        words["skipped"] = Counter(words["skipped"])
        words["examples"] = [Skip(**skip) for skip in words["examples"]]
        return cls(**{name: _view(mapped, base, entry) for name, entry in header.items()}, **words)


def _view(mapped: mmap.mmap, base: int, entry: dict[str, Any]) -> np.ndarray:
    shape = entry["shape"]
    count, start = int(np.prod(shape)), base + entry["data_offsets"][0]
    if not count:
        return np.zeros(shape, dtype=_DTYPES[entry["dtype"]])
    return np.frombuffer(mapped, _DTYPES[entry["dtype"]], count, start).reshape(shape)


_STARTS = ("item_starts", "span_starts", "time_starts")


def _starts(groups: Sequence[Sequence[Any]]) -> np.ndarray:
    """Where each group begins in all of them one after the other, and where the last ends, int64."""
    return np.cumsum([0] + [len(group) for group in groups], dtype=np.int64)


def _cut(values: np.ndarray, starts: list[int]) -> list[list[Any]]:
    """The groups between consecutive starts; numpy is asked once for all."""
    listed = values[starts[0] : starts[-1]].tolist() if starts[-1] > starts[0] else []
    return [listed[low - starts[0] : high - starts[0]] for low, high in pairwise(starts)]


def _joined_starts(all_starts: Sequence[np.ndarray]) -> np.ndarray:
    joined, before = [np.zeros(1, dtype=np.int64)], 0
    for starts in all_starts:
        joined.append(starts[1:] + before)
        before += starts[-1]
    return np.concatenate(joined)


def _shared_columns() -> tuple[str, ...]:
    """Columns whose values mean the same in every part of a source."""
    return (
        "rows", "tokens", "target_tokens", "item_encoders", "item_shapes", "item_seconds", "spans", "times",
        "media_skips",
    )  # fmt: skip


def _first_of_each(skips: Sequence[Skip], count: int = 3) -> list[Skip]:
    seen: Counter[str] = Counter()
    first = []
    for skip in skips:
        seen[skip.reason] += 1
        if seen[skip.reason] <= count:
            first.append(skip)
    return first
