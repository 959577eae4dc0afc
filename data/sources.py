"""Where rows come from: JSON, JSONL, parquet and arrow files, folders, saved and hub data sets.

A source is a list of raw rows with random access. Only JSON arrays are held in memory; JSONL is read line by
line through an index of line starts, columnar files are memory-mapped by `datasets`. Media columns stay
undecoded.
"""

import json
import mmap
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data.errors import RowError
from omni_ds.errors import UserError

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")
_JSON = (".json", ".jsonl")
_COLUMNAR = (".parquet", ".arrow")


class Source(Protocol):
    """Random access to raw rows.

    folder: where relative media paths start unless `media_dir` says otherwise. local: the rows are files
    there. fingerprint: changes when the rows may have changed. name, location(i): of the set and of row i,
    for the user.
    """

    name: str
    folder: Path
    local: bool
    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any:
        """The raw row, a dict if it is usable; RowError when it cannot be parsed."""

    def location(self, index: int) -> str: ...


class JsonSource:
    """A JSON array of rows, in memory."""

    local = True

    def __init__(self, path: Path):
        try:
            rows = json.loads(path.read_bytes())
        except ValueError as error:
            raise UserError(
                f"{path}: not valid JSON ({error}); one object per line needs the suffix .jsonl"
            ) from None
        if not isinstance(rows, list):
            raise UserError(f"{path}: a JSON data set is an array of rows, this is a {type(rows).__name__}")
        self.path, self.name, self.folder, self.fingerprint = path, str(path), path.parent, _stat([path])
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]

    def location(self, index: int) -> str:
        return f"{self.path}, row {index}"


class JsonlSource:
    """One JSON object per line; blank lines do not count."""

    local = True

    def __init__(self, path: Path):
        self.path, self.name, self.folder, self.fingerprint = path, str(path), path.parent, _stat([path])
        self._starts, self._numbers = _lines(path)
        self._map: mmap.mmap | None = None

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        if self._map is None:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        start = int(self._starts[index])
        self._map.seek(start)
        line = self._map.readline()
        try:
            return json.loads(line)
        except ValueError as error:
            raise RowError("row is not valid JSON", str(error)) from None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_map": None}

    def location(self, index: int) -> str:
        return f"{self.path}:{self._numbers[index]}"


class DatasetSource:
    """A `datasets.Dataset`, with images and audio as {bytes, path} rather than decoded."""

    def __init__(self, dataset: Any, name: str, folder: Path, fingerprint: str, local: bool = True):
        self.dataset, self.name, self.folder = _undecoded(dataset), name, folder
        self.fingerprint, self.local = fingerprint, local

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def location(self, index: int) -> str:
        return f"{self.name}, row {index}"


def open_source(
    path: str, split: str = "train", name: str | None = None, cache_dir: str | None = None
) -> Source:
    """A file, a folder (saved data set, `<split>.jsonl` and the like, or data files), or a hub data set.

    cache_dir: where `datasets` may write. UserError when there is nothing to read.
    """
    local = Path(path).expanduser()
    if local.is_file():
        return _open_file(local, cache_dir)
    if local.is_dir():
        return _open_folder(local, split, name, cache_dir)
    if (
        local.suffix in (*_JSON, *_COLUMNAR)
        or path.startswith((".", "/", "~"))
        or not _HUB_NAME.fullmatch(path)
    ):
        raise UserError(f"omni.data: {path} does not exist (looked in {Path.cwd()}); correct the path")
    return _load(path, split, name, cache_dir, Path.cwd())


def _open_file(path: Path, cache_dir: str | None) -> Source:
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty")
    if path.suffix == ".jsonl":
        return JsonlSource(path)
    if path.suffix == ".json":
        return JsonlSource(path) if _looks_like_lines(path) else JsonSource(path)
    if path.suffix == ".arrow":
        import datasets

        return DatasetSource(datasets.Dataset.from_file(str(path)), str(path), path.parent, _stat([path]))
    if path.suffix == ".parquet":
        return _parquet([path], str(path), path.parent, cache_dir)
    raise UserError(
        f"{path}: data files are .json, .jsonl, .parquet or .arrow, not {path.suffix or 'without suffix'}"
    )


def _open_folder(folder: Path, split: str, name: str | None, cache_dir: str | None) -> Source:
    for suffix in (*_JSON, *_COLUMNAR):
        if (folder / f"{split}{suffix}").is_file():
            return _open_file(folder / f"{split}{suffix}", cache_dir)
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        import datasets

        saved = datasets.load_from_disk(str(folder))
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise UserError(f"{folder}: no split {split!r}; it has {', '.join(saved)}")
            saved = saved[split]
        return DatasetSource(saved, str(folder), folder, _stat(folder.rglob("*.arrow")))
    shards = sorted(folder.glob(f"{split}-*.parquet")) or sorted(folder.glob(f"data/{split}-*.parquet"))
    if shards:
        return _parquet(shards, str(folder), folder, cache_dir)
    if not any(folder.iterdir()):
        raise UserError(f"omni.data: the folder {folder} is empty")
    return _load(str(folder), split, name, cache_dir, folder)


def _parquet(files: list[Path], name: str, folder: Path, cache_dir: str | None) -> Source:
    import datasets

    try:
        dataset = datasets.Dataset.from_parquet([str(file) for file in files], cache_dir=cache_dir)
    except Exception as error:  # pyarrow and datasets raise many kinds
        raise UserError(f"{name}: not a readable parquet file: {_first_line(error)}") from None
    return DatasetSource(dataset, name, folder, _stat(files))


def _load(path: str, split: str, name: str | None, cache_dir: str | None, folder: Path) -> Source:
    import datasets

    try:
        dataset = datasets.load_dataset(path, name, split=split, cache_dir=cache_dir)
    except Exception as error:  # missing, gated, offline, wrong split: all the user's to solve
        raise UserError(
            f"omni.data: {path} (split {split!r}) is no local file or folder and cannot be loaded as a "
            f"data set: {_first_line(error)}"
        ) from None
    return DatasetSource(
        dataset,
        f"{path}[{split}]",
        folder,
        f"{path}/{name}/{split}/{dataset._fingerprint}",
        folder != Path.cwd(),
    )


def _undecoded(dataset: Any) -> Any:
    """Images, audio and video, also in lists, as {bytes, path}: one rank decodes them, later."""
    import datasets

    def plain(feature: Any) -> Any:
        if isinstance(feature, datasets.Image | datasets.Audio | datasets.Video):
            return type(feature)(decode=False)
        if isinstance(feature, datasets.Sequence | datasets.List):
            return type(feature)(plain(feature.feature), length=feature.length)
        return feature

    wanted = {name: plain(feature) for name, feature in dataset.features.items()}
    changed = {name: feature for name, feature in wanted.items() if feature != dataset.features[name]}
    for name, feature in changed.items():
        dataset = dataset.cast_column(name, feature)
    return dataset


def _lines(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Byte offset and line number (from 1) of every line that is not blank."""
    starts, numbers, offset = [], [], 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                starts.append(offset)
                numbers.append(number)
            offset += len(line)
    return np.array(starts, dtype=np.int64), np.array(numbers, dtype=np.int64)


def _looks_like_lines(path: Path) -> bool:
    """Whether a .json file is in fact one object per line."""
    with open(path, "rb") as file:
        first, second = file.readline().strip(), file.readline().strip()
    if not (first.startswith(b"{") and first.endswith(b"}")):
        return False
    return not second or second.startswith(b"{")


def _stat(files: Iterable[Path]) -> str:
    """Names, sizes and times of change."""
    parts = []
    for file in sorted(files):
        stat = os.stat(file)
        parts.append(f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}")
    return "|".join(parts)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
