"""Tensors of an HF checkpoint by name, read in slices from safetensors; nothing is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from omni_ds.errors import UserError

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
_MAPPED = 4 << 20  # bytes read from a file before it is opened anew: what was read stays mapped until then
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


_WEIGHTS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
)
_SIDE_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model", "*.md", "*.py", "LICENSE*", "*.tiktoken"]


def side_files(path: str, others: Sequence[str] = ()) -> list[Path]:
    """Every file of a checkpoint but its weights: configuration, tokenizer, processor, templates, papers, and
    ``others``.

    Sub-folders and hidden files are left out, and so is the list that an export of ours leaves.
    """
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, allow_patterns=[*_SIDE_PATTERNS, *others]))
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file()
        and not file.name.startswith(".")
        and (file.name in others or not file.name.endswith(_WEIGHTS))
        and file.name != "omni_export.json"
    )


class WeightSource:
    """A checkpoint: a folder, one safetensors file, or a repository of the hub.

    A repository is taken from the hub's cache, or downloaded when it may be (HF_HUB_OFFLINE unset). Raises
    UserError when there are no safetensors, and naming the file when one is missing or damaged.
    """

    def __init__(self, path: str, where: str = "path"):
        self.path, self.where = path, where
        self._open: dict[Path, Any] = {}
        self._pages: dict[Path, int] = {}
        self._file_of = self._find()

    def _find(self) -> dict[str, Path]:
        local = Path(self.path)
        if local.is_file():
            return dict.fromkeys(self._handle(local).keys(), local)
        folder = local if local.is_dir() else self._download()
        if (folder / INDEX_FILE).is_file():
            weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
            return {name: folder / file for name, file in weight_map.items()}
        if (folder / SINGLE_FILE).is_file():
            return dict.fromkeys(self._handle(folder / SINGLE_FILE).keys(), folder / SINGLE_FILE)
        if any((folder / name).exists() for name in _PICKLES):
            raise UserError(
                f"{self.where}: {self.path} has pytorch_model.bin only, a pickle, which is not read. "
                f"Convert it: AutoModel.from_pretrained({self.path!r}).save_pretrained(folder) writes "
                f"safetensors"
            )
        raise UserError(f"{self.where}: {self.path} has neither {SINGLE_FILE} nor {INDEX_FILE}")

    def _download(self) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            patterns = ["*.safetensors", "*.safetensors.index.json", "config.json"]
            return Path(snapshot_download(self.path, allow_patterns=patterns))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise UserError(
                f"{self.where}: {self.path} is neither a folder here nor a repository that can be had from "
                f"the hub or its cache: {str(error).splitlines()[0]}"
            ) from error

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{self.where}: {file} cannot be read ({error}); fetch it again") from error
        return self._open[file]

    def names(self) -> tuple[str, ...]:
        """Names of all tensors as the checkpoint has them."""
        return tuple(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self._slice(name).get_dtype()]

    def read(self, name: str, index: Sequence[slice] | None = None) -> Tensor:
        """A tensor, or the part ``index`` (one slice a dimension) of it, on the CPU in the checkpoint's
        dtype."""
        part = self._slice(name)
        value = part[tuple(index)] if index else part[...]
        file = self._file_of[name]
        self._pages[file] = self._pages.get(file, 0) + value.nbytes
        if self._pages[file] > _MAPPED:
            del self._open[file], self._pages[file]
        return value

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        try:
            return self._handle(file).get_slice(name)
        except SafetensorError as error:
            raise UserError(f"{self.where}: {file} has no tensor {name}, though the index says so") from error
