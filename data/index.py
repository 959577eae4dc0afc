"""The data set as the rest of the program sees it: numbers of every sample, token ids and media on demand."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import MediaError, RowError
from data.index_build import Measurer, build_index, describe_skip
from data.index_store import Record, SourceIndex, cache_path, fingerprint
from data.preprocess import Preprocess
from data.rows import RowReader, Sample
from data.sources import Source, open_source
from data.text import TextProcessor
from omni_ds.errors import UserError
from omni_ds.plan.sample import Item, SampleMeta


@dataclass(frozen=True)
class EncodedSample:
    """input_ids: int64 [tokens]. labels: int64 [tokens], labels[t] is what position t predicts, -100 nothing."""

    input_ids: np.ndarray
    labels: np.ndarray
    meta: SampleMeta


class IndexedDataset:
    """Usable samples of one or more sources, numbered through from 0.

    source_ranges: (start, stop) of each source's samples. weights: of each source. skipped: rows left out, by reason.
    text, media, metas: what the samples were measured with.
    """

    def __init__(
        self,
        measurers: Sequence[Measurer],
        indexes: Sequence[SourceIndex],
        weights: Sequence[float],
    ):
        self._measurers, self._indexes = list(measurers), list(indexes)
        self.weights = tuple(weights)
        stops = np.cumsum([len(index) for index in indexes])
        self.source_ranges = tuple(
            (int(stop) - len(index), int(stop)) for index, stop in zip(indexes, stops, strict=True)
        )
        self.skipped: Counter[str] = sum((index.skipped for index in indexes), Counter())
        self.text: TextProcessor = measurers[0].text
        self.media: Mapping[str, Preprocess] = measurers[0].media
        self.encoder_metas = measurers[0].metas
        self._stops = stops
        self._make_caches()

    def _make_caches(self) -> None:
        self._measure = lru_cache(4096)(lambda encoder, shape: self.encoder_metas[encoder].measure(shape))
        self._sample = lru_cache(16)(self._read)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_measure", "_sample")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_caches()

    def __len__(self) -> int:
        return int(self._stops[-1])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each source."""
        return tuple(stop - start for start, stop in self.source_ranges)

    def _find(self, row: int) -> tuple[Measurer, SourceIndex, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"sample {row} of {len(self)}")
        number = int(np.searchsorted(self._stops, row, side="right"))
        return self._measurers[number], self._indexes[number], row - self.source_ranges[number][0]

    def where(self, row: int) -> str:
        """File and row (or line) of a sample, for messages."""
        measurer, index, local = self._find(row)
        return measurer.source.location(int(index.rows[local]))

    def meta(self, row: int) -> SampleMeta:
        """Numbers of one sample; nothing is read."""
        _, index, local = self._find(row)
        items = []
        for ordinal, (encoder, shape, offset) in enumerate(index.items(local)):
            segments, rows = self._measure(encoder, shape)
            items.append(Item(row, ordinal, encoder, shape, segments, rows, ((offset, rows),)))
        return SampleMeta(
            row,
            int(index.tokens[local]),
            int(index.target_tokens[local]),
            tuple(items),
            index.task_names[index.tasks[local]],
        )

    def metas(self, rows: Sequence[int]) -> list[SampleMeta]:
        return [self.meta(row) for row in rows]

    def _read(self, row: int) -> Sample:
        measurer, index, local = self._find(row)
        return measurer.reader.read(measurer.source[int(index.rows[local])])

    def encode(self, row: int) -> EncodedSample:
        """Token ids and labels, exactly as measured. UserError when the data file has changed since."""
        meta = self.meta(row)
        try:
            tokenised = self.text.tokenise(self._sample(row), verify=False)
            input_ids, labels, offsets = tokenised.expand([item.rows for item in meta.items])
        except (RowError, ValueError) as error:
            raise UserError(
                f"{self.where(row)}: changed while it was in use ({error}); start again"
            ) from None
        spans = tuple(item.spans[0][0] for item in meta.items)
        if (
            len(input_ids) != meta.tokens
            or int((labels >= 0).sum()) != meta.target_tokens
            or offsets != spans
        ):
            raise UserError(
                f"{self.where(row)}: is not what was indexed; start again to index the new content"
            )
        return EncodedSample(input_ids, labels, meta)

    def load_media(self, row: int, ordinal: int) -> np.ndarray:
        """float32 of the planned shape, image [3, height, width], audio [n_mels, frames]. MediaError."""
        item = self.meta(row).items[ordinal]
        try:
            return self.media[item.encoder].load(self._sample(row).media[ordinal], item.shape)
        except RowError as error:
            raise MediaError(error.reason, f"{self.where(row)}: {error.detail}") from None

    def blank_media(self, row: int, ordinal: int) -> np.ndarray:
        """Zeros in the place of a medium that cannot be loaded."""
        item = self.meta(row).items[ordinal]
        return self.media[item.encoder].blank(item.shape)

    def describe(self) -> str:
        """Samples, tokens and skips of each source, a line each."""
        lines = []
        for measurer, index in zip(self._measurers, self._indexes, strict=True):
            skipped = ", ".join(f"{count} {reason}" for reason, count in index.skipped.most_common())
            lines.append(
                f"{measurer.source.name}: {len(index)} samples, {int(index.tokens.sum())} tokens, "
                f"{int(index.target_tokens.sum())} of them targets, {len(index.item_encoders)} media"
                + (f"; skipped: {skipped}" if skipped else "")
            )
        return "\n".join(lines)


def open_dataset(
    sources: Sequence[Any],
    cfg: Any,
    text: TextProcessor,
    media: Mapping[str, Preprocess],
    metas: Mapping[str, Any],
    *,
    builder: bool,
    barrier: Callable[[], None] | None = None,
    where: str = "omni.data.train",
) -> IndexedDataset:
    """Open sets of samples and their index.

    sources: `SourceConfig`s. cfg: the `DataConfig`. media, metas: encoder name -> preprocessing, EncoderMeta.
    builder: whether this process makes the index where none is cached; the others read it after `barrier()`, which
    every process passes once. UserError when a set is missing, when nothing is left of it, when more than
    `max_skip_fraction` was skipped, or at the first bad row if `on_error` says so; on every rank alike.
    """
    measurers = [_measurer(source, cfg, text, media, metas) for source in sources]
    for number, measurer in enumerate(measurers):
        if not len(measurer.source):
            raise UserError(f"{where}[{number}]: {sources[number].path} has no rows")
    limits = [source.max_samples or len(m.source) for source, m in zip(sources, measurers, strict=True)]
    counts = [min(limit, len(m.source)) for limit, m in zip(limits, measurers, strict=True)]
    paths = [
        _path(source, cfg, m, count) for source, m, count in zip(sources, measurers, counts, strict=True)
    ]
    raise_first = cfg.on_error == "raise"
    indexes: list[SourceIndex] = []
    if builder:
        try:
            for measurer, count, path in zip(measurers, counts, paths, strict=True):
                indexes.append(_build(measurer, count, path, raise_first))
        finally:
            if barrier is not None:
                barrier()
    else:
        if barrier is not None:
            barrier()
        for measurer, count, path in zip(measurers, counts, paths, strict=True):
            indexes.append(_read(measurer, count, path, raise_first))
    dataset = IndexedDataset(measurers, indexes, [source.weight for source in sources])
    _check(dataset, measurers, indexes, counts, cfg, where)
    return dataset


def _measurer(source: Any, cfg: Any, text: TextProcessor, media: Mapping, metas: Mapping) -> Measurer:
    opened: Source = open_source(source.path, source.split, source.name, cfg.cache_dir)
    media_dir = Path(source.media_dir).expanduser() if source.media_dir else opened.folder
    reader = RowReader(text.modalities, media_dir, source.columns, source.query)
    return Measurer(opened, reader, text, media, metas, cfg.max_length, cfg.max_tokens_per_micro_batch)


def _path(source: Any, cfg: Any, measurer: Measurer, count: int) -> Path | None:
    reading = [str(measurer.reader.media_dir.resolve()), source.columns, source.query, count]
    limits = [cfg.max_length, cfg.max_tokens_per_micro_batch]
    key = fingerprint(measurer.source, reading, measurer.text, measurer.media, measurer.metas, limits)
    return cache_path(cfg.cache_dir, measurer.source, key)


def _build(measurer: Measurer, count: int, path: Path | None, raise_first: bool) -> SourceIndex:
    """The cached index, or a new one, written to `path`. A failure is left there for the other ranks."""
    failure = path.with_suffix(".error") if path else None
    if failure:
        failure.unlink(missing_ok=True)
    cached = _cached(path)
    if cached is not None and not _mended(measurer, cached):
        return cached
    try:
        index = build_index(measurer, count, raise_first=raise_first)
    except UserError as error:
        if failure:
            with suppress(OSError):
                failure.write_text(str(error))
        raise
    if path:
        try:
            index.save(path)
        except OSError as error:
            raise UserError(f"the sample index cannot be written to {path.parent}: {error}; "
                            "set omni.data.cache_dir to a folder with space") from None  # fmt: skip
    return index


def _mended(measurer: Measurer, index: SourceIndex) -> bool:
    """Whether a row that was skipped for its media can be used now (media files are not in the fingerprint)."""
    return any(isinstance(measurer.measure(int(row)), Record) for row in index.media_skips[:1000])


def _read(measurer: Measurer, count: int, path: Path | None, raise_first: bool) -> SourceIndex:
    """What the builder left; where its disk is not shared, the same work again."""
    if path and path.with_suffix(".error").is_file():
        raise UserError(path.with_suffix(".error").read_text())
    cached = _cached(path)
    return cached if cached is not None else build_index(measurer, count, raise_first=raise_first, quiet=True)


def _cached(path: Path | None) -> SourceIndex | None:
    if path is None or not path.is_file():
        return None
    try:
        return SourceIndex.load(path)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # damaged: made again


def _check(
    dataset: IndexedDataset,
    measurers: Sequence[Measurer],
    indexes: Sequence[SourceIndex],
    counts: Sequence[int],
    cfg: Any,
    where: str,
) -> None:
    examples = [
        describe_skip(m.source, skip)
        for m, index in zip(measurers, indexes, strict=True)
        for skip in index.examples
    ]
    if cfg.on_error == "raise" and examples:
        raise UserError(examples[0] + '; data.on_error is "raise"')
    for measurer, index in zip(measurers, indexes, strict=True):
        if not len(index):
            raise UserError(
                f"{where}: no row of {measurer.source.name} can be used: {_reasons(index.skipped)}; for example "
                + "; ".join(describe_skip(measurer.source, skip) for skip in index.examples[:3])
            )
    skipped, total = dataset.skipped.total(), sum(counts)
    if skipped > cfg.max_skip_fraction * total:
        raise UserError(
            f"{where}: {skipped} of {total} rows cannot be used, more than data.max_skip_fraction "
            f"{cfg.max_skip_fraction:g} allows: {_reasons(dataset.skipped)}; for example "
            + "; ".join(examples[:5])
        )


def _reasons(skipped: Counter[str]) -> str:
    return ", ".join(f"{reason} ({count})" for reason, count in skipped.most_common())
