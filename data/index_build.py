"""Measure every row of a source once: token counts, targets, planned shapes; in several processes for large
ones.
"""

import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from data.errors import MediaError, RowError
from data.index_store import Record, Skip, SourceIndex
from data.media import MediaHeader, MediaRef, read_header
from data.preprocess import Preprocess
from data.rows import RowReader
from data.sources import Source
from data.text import TextProcessor
from omni_ds.errors import UserError

_CHUNK = 128
_SMALL = 500  # rows below which starting processes costs more than it saves
_MAX_PROCESSES = 16
_HEADERS = 100_000  # remembered at once


@dataclass(frozen=True)
class Measurer:
    """Everything that is needed to measure the first `rows` rows of one source."""

    source: Source
    rows: int
    reader: RowReader
    text: TextProcessor
    media: Mapping[str, Preprocess]
    metas: Mapping[str, Any]
    max_length: int
    max_tokens_per_micro_batch: int
    _headers: dict[tuple[str, str], MediaHeader] = field(default_factory=dict, repr=False)

    def measure(self, row: int) -> Record | Skip:
        try:
            return self._measure(row)
        except RowError as error:
            return Skip(row, error.reason, error.detail, isinstance(error, MediaError))

    def _measure(self, row: int) -> Record:
        sample = self.reader.read(self.source[row])
        tokenised = self.text.tokenise(sample)
        encoders = {p.modality: name for name, p in self.text.placeholders.items()}
        shapes, counts = [], []
        for ref in sample.media:
            encoder = encoders[ref.modality]
            shape = self.media[encoder].plan_shape(self._header(ref))
            try:
                counts.append(self.metas[encoder].measure(shape)[1])
            except UserError as error:
                raise MediaError(f"{ref.modality} does not fit its encoder", str(error)) from None
            shapes.append((encoder, shape))
        input_ids, labels, offsets = tokenised.expand(counts)
        tokens = len(input_ids)
        if tokens > self.max_length:
            raise RowError("longer than max_length", f"{tokens} tokens, {self.max_length} allowed")
        if tokens > self.max_tokens_per_micro_batch:
            raise RowError(
                "longer than max_tokens_per_micro_batch",
                f"{tokens} tokens, {self.max_tokens_per_micro_batch} allowed",
            )
        items = tuple(
            (encoder, shape, offset) for (encoder, shape), offset in zip(shapes, offsets, strict=True)
        )
        return Record(row, tokens, int((labels >= 0).sum()), sample.task, items)

    def _header(self, ref: MediaRef) -> MediaHeader:
        """Files that several rows share are looked at once."""
        if ref.path is None:
            return read_header(ref)
        key = ref.modality, ref.path
        if key not in self._headers:
            if len(self._headers) >= _HEADERS:
                self._headers.clear()
            self._headers[key] = read_header(ref)
        return self._headers[key]

    def measure_chunk(self, rows: range) -> list[Record | Skip]:
        return [self.measure(row) for row in rows]


def build_index(measurer: Measurer, *, raise_first: bool, quiet: bool = False) -> SourceIndex:
    """Measure every row, in order. UserError at the first unusable one when raise_first."""
    rows = measurer.rows
    chunks = [range(start, min(start + _CHUNK, rows)) for start in range(0, rows, _CHUNK)]
    results: list[Record | Skip] = []
    for part in _progress(_measured(measurer, chunks), len(chunks), measurer.source, quiet):
        for result in part:
            if raise_first and isinstance(result, Skip):
                raise UserError(describe_skip(measurer.source, result) + '; omni.data.on_error is "raise"')
        results += part
    measurer._headers.clear()
    return SourceIndex.from_results(results, list(measurer.media))


def describe_skip(source: Source, skip: Skip) -> str:
    detail = f": {skip.detail}" if skip.detail else ""
    return f"{source.location(skip.row)}: {skip.reason}{detail}"


_shared: Measurer | None = None  # inherited by forked workers, so that nothing is pickled but row numbers


def _work(rows: range) -> list[Record | Skip]:
    return _shared.measure_chunk(rows)


def _measured(measurer: Measurer, chunks: list[range]) -> Iterator[list[Record | Skip]]:
    processes = min(os.cpu_count() or 1, _MAX_PROCESSES, len(chunks))
    if measurer.rows < _SMALL or processes < 2:
        yield from map(measurer.measure_chunk, chunks)
        return
    global _shared
    _shared = measurer
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork"))
    try:
        yield from pool.map(_work, chunks)
    finally:
        pool.shutdown(cancel_futures=True)
        _shared = None


def _progress(parts: Iterable[Any], total: int, source: Source, quiet: bool) -> Iterator[Any]:
    if quiet or not sys.stderr.isatty():
        yield from parts
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(
        parts,
        f"indexing {source.name}",
        total=total,
        console=Console(stderr=True),
        transient=True,
    )
