"""Open sets of samples: find the cached index of each source, or make it."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from data.dataset import EncodedSample, IndexedDataset
from data.index_build import Measurer, describe_skip, processes_for
from data.index_cache import cache_folder, fingerprint, next_edition
from data.index_layout import Layout, block_name
from data.index_maker import leave_failure, make_here, make_in_background, publish, valid
from data.index_progress import progress
from data.index_store import IndexPart, Record
from data.preprocess import Preprocess
from data.rows import RowReader
from data.sounds import SoundReader
from data.source_index import SourceIndex, failure_file
from data.sources import open_source
from data.text import TextProcessor
from omni_ds.errors import UserError

__all__ = ["EncodedSample", "IndexedDataset", "open_dataset"]


def open_dataset(
    sources: Sequence[Any],
    cfg: Any,
    text: TextProcessor,
    media: Mapping[str, Preprocess],
    metas: Mapping[str, Any],
    *,
    builder: bool,
    rolling: bool = False,
    barrier: Callable[[], None] | None = None,
    where: str = "omni.data",
) -> IndexedDataset:
    """Open sets of samples with their index.

    sources: `SourceConfig`s. cfg: the `DataConfig`. media, metas: encoder name -> preprocessing, EncoderMeta.
    builder: whether this process makes an index that is not cached. The others read it after `barrier()`,
    which every process passes once; without a barrier the caller opens as builder first. rolling: return as
    soon as the first block of each index is there; a process that ends with the builder makes the others, and
    who needs them waits. Then samples of large sources have the numbers that `IndexedDataset` says.
    UserError when a set is missing or empty, when nothing of it can be used, when more than
    `max_skip_fraction` of the rows was skipped, or at the first bad row if `on_error` says so.
    """
    openings = []
    for source in sources:
        openings.append(_Opening(source, cfg, text, media, metas))
        if not openings[-1].measurer.rows:
            raise UserError(f"{where}: {source.path} has no rows")
    measurers = [opening.measurer for opening in openings]
    indexes: list[SourceIndex] = []

    def check() -> None:
        _check(measurers, indexes, cfg, where)

    if builder:
        try:
            indexes += _started(openings)
            for index in indexes:
                index.check = check
                _await(index, 1 if rolling else index.blocks)
        finally:
            if barrier is not None:
                barrier()
    else:
        if barrier is not None:
            barrier()
        indexes += [opening.read() for opening in openings]
    for index in indexes:
        index.check = check
        index.read()
    if not rolling:
        for index in indexes:
            len(index)
    return IndexedDataset(measurers, indexes, [source.weight for source in sources], rolling=rolling)


class _Opening:
    """A source on its way to an index."""

    def __init__(self, source: Any, cfg: Any, text: TextProcessor, media: Mapping, metas: Mapping):
        opened = open_source(source.path, source.split, source.name, cfg.cache_dir)
        media_dir = Path(source.media_dir).expanduser() if source.media_dir else opened.folder
        reader = RowReader(text.modalities, media_dir, source.columns, source.query)
        self.measurer = Measurer(
            source=opened,
            rows=min(len(opened), source.max_samples or len(opened)),
            reader=SoundReader(reader) if cfg.use_audio_in_video else reader,
            text=text,
            media=media,
            metas=metas,
            max_length=cfg.max_length,
            max_tokens_per_micro_batch=cfg.max_tokens_per_micro_batch,
        )
        self.layout = Layout.of(self.measurer.rows)
        self.raise_first = cfg.on_error == "raise"
        reading = [str(media_dir.resolve()), source.columns, source.query, self.measurer.rows]
        reading += [cfg.use_audio_in_video]
        limits = [cfg.max_length, cfg.max_tokens_per_micro_batch]
        key = fingerprint(opened, reading, text, media, metas, limits)
        self.folder = cache_folder(cfg.cache_dir, opened, key, self.layout.blocks)

    def prepare(self) -> bool:
        """Whether blocks are missing, after those that hold out-of-date skips were given up."""
        if self.folder is None:
            return False
        with suppress(OSError):
            failure_file(self.folder).unlink()
        there = [block for block in range(self.layout.blocks) if (self.folder / block_name(block)).is_file()]
        torn = [block for block in there if not valid(self.folder, block)]
        for block in torn:  # by a full disk or a loss of power; who reads shall not find it
            with suppress(OSError):
                (self.folder / block_name(block)).unlink()
        if torn or len(there) < self.layout.blocks:
            return True
        if not os.access(self.folder, os.W_OK) or not self._mended():
            return False
        self.folder = next_edition(self.folder)
        return True

    def _mended(self) -> bool:
        """Whether a row skipped for its media can be used now; media files are not in the fingerprint."""
        index = self.index()
        index.read()
        skips = [int(row) for part in index.known for row in part.media_skips][:1000]
        return any(isinstance(self.measurer.measure(row), Record) for row in skips)

    def index(self) -> SourceIndex:
        return SourceIndex(self.measurer.source.name, self.layout, self.folder)

    def make(self, *, shown: bool) -> list[IndexPart]:
        """All blocks, by this process."""
        if not shown:
            return make_here(self.measurer, self.layout, raise_first=self.raise_first)
        with progress(self.measurer.source.name, self.layout.rows) as show:
            return make_here(self.measurer, self.layout, raise_first=self.raise_first, show=show)

    def in_memory(self, *, shown: bool) -> SourceIndex:
        return SourceIndex(self.measurer.source.name, self.layout, None, self.make(shown=shown))

    def start(self, processes: int) -> None:
        """Begin to make the missing blocks in a process of its own."""
        try:
            make_in_background(
                self.measurer,
                self.layout,
                self.folder,
                raise_first=self.raise_first,
                processes=processes,
            )
        except OSError as error:
            raise UserError(
                f"omni.data.cache_dir: the sample index cannot be written to {self.folder} ({error}); name "
                "another folder"
            ) from None

    def make_small(self) -> None:
        """Make an index of one block here. A failure is left there for the other ranks."""
        try:
            (part,) = self.make(shown=True)
        except UserError as error:
            leave_failure(self.folder, str(error))
            raise
        publish(part, self.folder, 0)

    def read(self) -> SourceIndex:
        """What the builder made or makes; where its disk is not this one, the same work again."""
        if self.folder is None:
            return self.in_memory(shown=False)
        index = self.index()
        index.raise_failure()
        if self.layout.blocks == 1:
            return index if valid(self.folder, 0) else self.in_memory(shown=False)
        if not self.folder.is_dir():
            self.start(processes_for(self.measurer.rows))
        return index


def _started(openings: Sequence[_Opening]) -> list[SourceIndex]:
    """Indexes that are there, or whose blocks are being made."""
    missing = [opening for opening in openings if opening.prepare()]
    large = [opening for opening in missing if opening.layout.blocks > 1]
    for opening in large:
        opening.start(max(2, processes_for(opening.measurer.rows) // len(large)))
    for opening in missing:
        if opening.layout.blocks == 1:
            opening.make_small()
    return [
        opening.in_memory(shown=True) if opening.folder is None else opening.index() for opening in openings
    ]


def _await(index: SourceIndex, blocks: int) -> None:
    index.read()
    if len(index.known) >= blocks:
        return
    with progress(index.name, index.layout.rows) as show:
        while len(index.known) < blocks:
            index.wait(show)


def _check(measurers: Sequence[Measurer], indexes: Sequence[SourceIndex], cfg: Any, where: str) -> None:
    """What is known so far against the limits on rows that cannot be used."""

    def examples(limit: int, only: SourceIndex | None = None) -> str:
        found = [
            describe_skip(measurer.source, skip)
            for measurer, index in zip(measurers, indexes, strict=True)
            for skip in index.examples
            if only is None or index is only
        ]
        return "; ".join(found[:limit])

    skipped = sum((index.skipped for index in indexes), Counter())
    if cfg.on_error == "raise" and skipped:
        raise UserError(f'{examples(1)}; omni.data.on_error is "raise"')
    for measurer, index in zip(measurers, indexes, strict=True):
        if index.complete and not len(index):
            raise UserError(
                f"{where}: no row of {measurer.source.name} can be used: {_reasons(index.skipped)}; "
                f"for example {examples(3, index)}"
            )
    total = sum(measurer.rows for measurer in measurers)
    if skipped.total() > cfg.max_skip_fraction * total:
        raise UserError(
            f"{where}: {skipped.total()} of {total} rows cannot be used, more than "
            f"omni.data.max_skip_fraction {cfg.max_skip_fraction:g} allows: {_reasons(skipped)}; for example "
            f"{examples(5)}"
        )


def _reasons(skipped: Counter[str]) -> str:
    return ", ".join(f"{reason} ({count})" for reason, count in skipped.most_common())
