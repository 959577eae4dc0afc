"""Open sets of samples: find the cached index of each source, or make it."""

import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from data.dataset import EncodedSample, IndexedDataset
from data.index_build import Measurer, build_index, describe_skip
from data.index_store import Record, SourceIndex, cache_path, fingerprint
from data.preprocess import Preprocess
from data.rows import RowReader
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
    barrier: Callable[[], None] | None = None,
    where: str = "omni.data",
) -> IndexedDataset:
    """Open sets of samples with their index.

    sources: `SourceConfig`s. cfg: the `DataConfig`. media, metas: encoder name -> preprocessing, EncoderMeta.
    builder: whether this process makes an index that is not cached. The others read it after `barrier()`,
    which every process passes once; without a barrier the caller opens as builder first.
    UserError when a set is missing or empty, when nothing of it can be used, when more than
    `max_skip_fraction` of the rows was skipped, or at the first bad row if `on_error` says so.
    """
    measurers = []
    for source in sources:
        measurers.append(_measurer(source, cfg, text, media, metas))
        if not measurers[-1].rows:
            raise UserError(f"{where}: {source.path} has no rows")
    paths = [_path(source, cfg, measurer) for source, measurer in zip(sources, measurers, strict=True)]
    opened = list(zip(measurers, paths, strict=True))
    raise_first = cfg.on_error == "raise"
    if builder:
        try:
            indexes = [_build(measurer, path, raise_first) for measurer, path in opened]
        finally:
            if barrier is not None:
                barrier()
    else:
        if barrier is not None:
            barrier()
        indexes = [_read(measurer, path, raise_first) for measurer, path in opened]
    dataset = IndexedDataset(measurers, indexes, [source.weight for source in sources])
    _check(dataset, measurers, indexes, cfg, where)
    return dataset


def _measurer(source: Any, cfg: Any, text: TextProcessor, media: Mapping, metas: Mapping) -> Measurer:
    opened = open_source(source.path, source.split, source.name, cfg.cache_dir)
    media_dir = Path(source.media_dir).expanduser() if source.media_dir else opened.folder
    return Measurer(
        source=opened,
        rows=min(len(opened), source.max_samples or len(opened)),
        reader=RowReader(text.modalities, media_dir, source.columns, source.query),
        text=text,
        media=media,
        metas=metas,
        max_length=cfg.max_length,
        max_tokens_per_micro_batch=cfg.max_tokens_per_micro_batch,
    )


def _path(source: Any, cfg: Any, measurer: Measurer) -> Path | None:
    reading = [str(measurer.reader.media_dir.resolve()), source.columns, source.query, measurer.rows]
    limits = [cfg.max_length, cfg.max_tokens_per_micro_batch]
    key = fingerprint(measurer.source, reading, measurer.text, measurer.media, measurer.metas, limits)
    return cache_path(cfg.cache_dir, measurer.source, key)


def _build(measurer: Measurer, path: Path | None, raise_first: bool) -> SourceIndex:
    """The cached index, or a new one, written to `path`. A failure is left there for the other ranks."""
    failure = path.with_suffix(".error") if path else None
    if failure:
        failure.unlink(missing_ok=True)
    cached = _cached(path)
    if cached is not None and not _mended(measurer, cached):
        return cached
    try:
        index = build_index(measurer, raise_first=raise_first)
    except UserError as error:
        if failure:
            with suppress(OSError):
                failure.write_text(str(error))
        raise
    if path:
        try:
            index.save(path)
        except OSError as error:
            raise UserError(
                f"omni.data.cache_dir: the sample index cannot be written to {path.parent} ({error}); "
                "name a folder with space"
            ) from None
    return index


def _mended(measurer: Measurer, index: SourceIndex) -> bool:
    """Whether a row skipped for its media can be used now; media files are not in the fingerprint."""
    return any(isinstance(measurer.measure(int(row)), Record) for row in index.media_skips[:1000])


def _read(measurer: Measurer, path: Path | None, raise_first: bool) -> SourceIndex:
    """What the builder left; where its disk is not shared, the same work again."""
    if path and path.with_suffix(".error").is_file():
        raise UserError(path.with_suffix(".error").read_text())
    cached = _cached(path)
    return cached if cached is not None else build_index(measurer, raise_first=raise_first, quiet=True)


def _cached(path: Path | None) -> SourceIndex | None:
    if path is None or not path.is_file():
        return None
    try:
        return SourceIndex.load(path)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None  # damaged: made again


def _check(
    dataset: IndexedDataset,
    measurers: Sequence[Measurer],
    indexes: Sequence[SourceIndex],
    cfg: Any,
    where: str,
) -> None:
    def examples(limit: int, only: SourceIndex | None = None) -> str:
        found = [
            describe_skip(measurer.source, skip)
            for measurer, index in zip(measurers, indexes, strict=True)
            for skip in index.examples
            if only is None or index is only
        ]
        return "; ".join(found[:limit])

    if cfg.on_error == "raise" and dataset.skipped:
        raise UserError(f'{examples(1)}; omni.data.on_error is "raise"')
    for measurer, index in zip(measurers, indexes, strict=True):
        if not len(index):
            raise UserError(
                f"{where}: no row of {measurer.source.name} can be used: {_reasons(index.skipped)}; "
                f"for example {examples(3, index)}"
            )
    skipped, total = dataset.skipped.total(), sum(measurer.rows for measurer in measurers)
    if skipped > cfg.max_skip_fraction * total:
        raise UserError(
            f"{where}: {skipped} of {total} rows cannot be used, more than omni.data.max_skip_fraction "
            f"{cfg.max_skip_fraction:g} allows: {_reasons(dataset.skipped)}; for example {examples(5)}"
        )


def _reasons(skipped: Counter[str]) -> str:
    return ", ".join(f"{reason} ({count})" for reason, count in skipped.most_common())
