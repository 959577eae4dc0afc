"""Safetensors shards of an HF export, written by several ranks side by side.

Every rank adds the tensors it holds; a shard goes to disk as soon as it is full, so a rank never holds more
than one shard of copies in memory. The shards lie in a hidden folder beside the target (`staging_folder`)
under the rank's own tag until rank 0 gives them their final names
(`omni_ds.checkpoint.export.finish_export`).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from omni_ds.checkpoint.export_target import check_export_target, staging_folder
from omni_ds.errors import UserError

Manifest = list[tuple[str, dict[str, int]]]
"""Per shard: file name in the staging folder, bytes of each tensor in it. Plain data, fit for gathering."""

_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def parse_size(size: int | str) -> int:
    """Bytes of `5GB` (decimal, as in transformers), `5GiB` (binary) or a number; UserError otherwise."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise UserError(
            f'omni.export.max_shard_size: {size!r} is not a size; write for example "5GB" or "500MB"'
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


class ShardWriter:
    """Writes one rank's share of an export.

    Args:
        out_dir: the export folder to be. It must be absent, empty or an earlier export (UserError otherwise).
        rank_tag: file prefix, different on each writing rank, e.g. `rank00003`.
        max_shard_size: see `parse_size`. One tensor larger than it gets a shard of its own.
        dtype_of: dtype to store a floating point tensor in, by its name; integer tensors are stored as they
            are.
    """

    def __init__(
        self,
        out_dir: str | Path,
        rank_tag: str,
        max_shard_size: int | str,
        dtype_of: Callable[[str], torch.dtype],
    ) -> None:
        self._limit = parse_size(max_shard_size)
        self._dtype_of = dtype_of
        self._tag = rank_tag
        check_export_target(out_dir)
        self._folder = staging_folder(out_dir)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"export to {out_dir}: cannot create {self._folder}: {error.strerror or error}; "
                "name another folder"
            ) from error
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._seen: set[str] = set()
        self._manifest: Manifest = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copies `tensor` (any device and layout) in the export's dtype; writes a shard when one is full."""
        assert name not in self._seen, f"{name} was added twice"
        self._seen.add(name)
        dtype = self._dtype_of(name) if tensor.is_floating_point() else tensor.dtype
        copied = tensor.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
        size = copied.numel() * copied.element_size()
        if self._pending and self._pending_bytes + size > self._limit:
            self._flush()
        self._pending[name] = copied
        self._pending_bytes += size

    def close(self) -> Manifest:
        """Writes what is left and returns this rank's manifest (empty when nothing was added)."""
        if self._pending:
            self._flush()
        return self._manifest

    def _flush(self) -> None:
        file = f"{self._tag}-{len(self._manifest):05d}.safetensors"
        try:
            save_file(self._pending, self._folder / file, metadata={"format": "pt"})
        except Exception as error:  # safetensors raises its own SafetensorError for a full disk
            raise UserError(
                f"export: writing {self._folder / file} ({self._pending_bytes:,} bytes) failed: {error}; "
                "free space or export to another folder with --export"
            ) from error
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in self._pending.items()}
        self._manifest.append((file, sizes))
        self._pending, self._pending_bytes = {}, 0


def place_shards(folder: Path, manifests: Sequence[Manifest], rename: Callable[[str], str]) -> list[str]:
    """Gives the shards in `folder` their final names and writes the index. Returns the files it made.

    One shard becomes `model.safetensors`; more become `model-0000i-of-0000N.safetensors` in the order of the
    manifests, with `model.safetensors.index.json`. `rename` maps the names the tensors were added under to
    those of the exported class; a shard none of whose names change is moved, any other one is copied under a
    new header.
    """
    shards = [shard for manifest in manifests for shard in manifest]
    weight_map: dict[str, str] = {}
    files = []
    for number, (file, sizes) in enumerate(shards, start=1):
        final = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        names = {name: rename(name) for name in sizes}
        if all(new == old for old, new in names.items()):
            (folder / file).rename(folder / final)
        else:
            _copy_renamed(folder / file, folder / final, names)
            (folder / file).unlink()
        for name in names.values():
            assert name not in weight_map, f"{name} is in {weight_map[name]} and in {final}"
            weight_map[name] = final
        files.append(final)
    if len(shards) > 1:
        total = sum(size for _, sizes in shards for size in sizes.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        files.append("model.safetensors.index.json")
    return files


def _copy_renamed(source: Path, target: Path, names: Mapping[str, str]) -> None:
    """Copies a safetensors file with other tensor names; the data behind the header is copied as it is.

    The format: 8 bytes little-endian header length, JSON header whose offsets count from its end, data
    (https://github.com/huggingface/safetensors#format). The header is padded with spaces to keep the data
        aligned.
    """
    with open(source, "rb") as reader, open(target, "wb") as writer:
        header = json.loads(reader.read(int.from_bytes(reader.read(8), "little")))
        renamed = json.dumps({names.get(name, name): entry for name, entry in header.items()}).encode()
        renamed += b" " * (-len(renamed) % 8)
        writer.write(len(renamed).to_bytes(8, "little") + renamed)
        shutil.copyfileobj(reader, writer, 16 * 2**20)
