"""Measure every row of a source once: token counts, targets, planned shapes; in several processes for large
ones.
"""

import ctypes
import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from data.cache import BoundedCache
from data.errors import MediaError, RowError
from data.index_store import IndexedItem, IndexPart, Record, Skip
from data.media import MediaHeader, MediaRef, read_header
from data.planned import Planned, Preprocess
from data.rows import RowReader
from data.sounds import SoundReader
from data.sources import Source
from data.text import TextProcessor
from omni_ds.errors import UserError

_SMALL = 500  # rows below which starting processes costs more than it saves
_MAX_PROCESSES = 32
_HEADERS = 100_000  # remembered at once
_AHEAD = 4  # chunks given to each process beforehand


@dataclass(frozen=True)
class Measurer:
    """Everything that is needed to measure the first `rows` rows of one source."""

    source: Source
    rows: int
    reader: RowReader | SoundReader
    text: TextProcessor
    media: Mapping[str, Preprocess]
    metas: Mapping[str, Any]
    max_length: int
    max_tokens_per_micro_batch: int
    _headers: BoundedCache = field(default_factory=lambda: BoundedCache(_HEADERS), repr=False)

    def measure(self, row: int) -> Record | Skip:
        try:
            return self._measure(row)
        except RowError as error:
            return Skip(row, error.reason, error.detail, isinstance(error, MediaError))

    def _measure(self, row: int) -> Record:
        sample = self.reader.read(self.source[row])
        encoders = {p.modality: p.encoder for p in self.text.placeholders.values()}
        names = [encoders[ref.modality] for ref in sample.media]
        siblings = Counter(ref.modality for ref in sample.media)
        planned = [
            self._planned(name, ref, siblings[ref.modality])
            for name, ref in zip(names, sample.media, strict=True)
        ]
        tokenised = self.text.tokenise(sample, planned)
        input_ids, labels, spans = tokenised.expand([each.rows for each in planned])
        tokens = len(input_ids)
        if tokens > self.max_length:
            raise RowError("longer than max_length", f"{tokens} tokens, {self.max_length} allowed")
        if tokens > self.max_tokens_per_micro_batch:
            raise RowError(
                "longer than max_tokens_per_micro_batch",
                f"{tokens} tokens, {self.max_tokens_per_micro_batch} allowed",
            )
        items = tuple(
            IndexedItem(name, each.shape, where, each.seconds, each.times)
            for name, each, where in zip(names, planned, spans, strict=True)
        )
        return Record(row, tokens, int((labels >= 0).sum()), sample.task, items)

    def _planned(self, encoder: str, ref: MediaRef, siblings: int) -> Planned:
        planned = self.media[encoder].plan(replace(self._header(ref), siblings=siblings))
        try:
            return replace(planned, rows=self.metas[encoder].measure(planned.shape)[1])
        except UserError as error:
            raise MediaError(f"{ref.modality} does not fit its encoder", str(error)) from None

    def _header(self, ref: MediaRef) -> MediaHeader:
        """Files that several rows share are looked at once."""
        if ref.path is None:
            return read_header(ref)
        key = ref.modality, ref.path
        return self._headers.get(key, lambda: read_header(ref), lambda made: 1 + len(made.times) // 32)

    def measure_chunk(self, rows: range) -> IndexPart:
        return IndexPart.from_results([self.measure(row) for row in rows], list(self.media))


def measured(
    measurer: Measurer, chunks: Iterable[range], *, processes: int, background: bool = False
) -> Iterator[IndexPart]:
    """The parts of all chunks, in order; with processes < 2 made here. background: leave the cores to others
    where they want them.
    """
    if processes < 2:
        yield from map(measurer.measure_chunk, chunks)
        measurer._headers.clear()
        return
    global _shared
    _shared = measurer
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_begin,
        initargs=(os.getpid(), background),
    )
    waiting: deque[Future] = deque()
    chunks = iter(chunks)
    try:
        while True:
            # A few ahead of the slowest, not all: there may be a million.
            waiting.extend(
                pool.submit(_work, rows) for rows in islice(chunks, processes * _AHEAD - len(waiting))
            )
            if not waiting:
                return
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        _shared = None


def processes_for(rows: int) -> int:
    """How many processes measure so many rows."""
    return 1 if rows < _SMALL else min(len(os.sched_getaffinity(0)), _MAX_PROCESSES)


def first_skip(source: Source, part: IndexPart) -> str | None:
    """File, row and reason of the first row of the part that cannot be used."""
    return describe_skip(source, min(part.examples, key=lambda skip: skip.row)) if part.examples else None


def describe_skip(source: Source, skip: Skip) -> str:
    detail = f": {skip.detail}" if skip.detail else ""
    return f"{source.location(skip.row)}: {skip.reason}{detail}"


def die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


_shared: Measurer | None = None  # inherited by forked workers, so that nothing is pickled but row numbers


def _begin(parent: int, background: bool) -> None:
    die_with(parent)
    if background:
        os.nice(10)


def _work(rows: range) -> IndexPart:
    return _shared.measure_chunk(rows)
