"""The data set as the rest of the program sees it: numbers of every sample, token ids and media on demand."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from data.cache import BoundedCache
from data.errors import MediaError, RowError
from data.index_build import Measurer
from data.index_store import IndexPart
from data.planned import Planned, Preprocess
from data.rows import Sample
from data.source_index import SourceIndex
from data.text import TextProcessor
from omni_ds.plan.sample import Item, SampleMeta

_CACHED_TOKENS = 4_000_000  # per process, 9 bytes each
_CACHED_BYTES = 64 * 2**20  # of preprocessed media, per process


Parts = tuple[tuple[int, int], ...]


def _numbers(parts: Parts) -> list[int]:
    return [start + step for start, length in parts for step in range(length)]


@dataclass(frozen=True)
class EncodedSample:
    """input_ids: int64 [tokens]. labels: int64 [tokens], at t what t predicts, -100 for nothing. positions:
    int64 [tokens], or [k, tokens] of k kinds."""

    input_ids: np.ndarray
    labels: np.ndarray
    meta: SampleMeta
    positions: np.ndarray


class IndexedDataset:
    """Usable samples of one or more sources, numbered through from 0.

    source_ranges: (start, stop) of each source's samples. weights: of each source. text, media,
    encoder_metas: what the samples were measured with. growing: with rolling, and unless all sources are one
    block, their indexes for the sampler, else None.

    A growing data set counts the rows of a source of several blocks before it knows how many can be used:
    its range, its size and `len` are those of all rows, and the last numbers of the range, as many as rows
    are skipped, belong to no sample. So a sample's number does not depend on how much was known at the start.
    """

    def __init__(
        self,
        measurers: Sequence[Measurer],
        indexes: Sequence[SourceIndex],
        weights: Sequence[float],
        *,
        rolling: bool = False,
    ):
        self._measurers, self._indexes = list(measurers), list(indexes)
        self.weights = tuple(weights)
        sizes = [i.layout.rows if rolling and i.blocks > 1 else len(i) for i in indexes]
        stops = np.cumsum(sizes)
        self.source_ranges = tuple(
            (int(stop) - size, int(stop)) for size, stop in zip(sizes, stops, strict=True)
        )
        several = rolling and any(index.blocks > 1 for index in indexes)
        self.growing: tuple[SourceIndex, ...] | None = tuple(indexes) if several else None
        self.text: TextProcessor = measurers[0].text
        self.media: Mapping[str, Preprocess] = measurers[0].media
        self.encoder_metas = measurers[0].metas
        self._stops = stops
        self._make_caches()

    def _make_caches(self) -> None:
        self._measure = lru_cache(4096)(lambda encoder, shape: self.encoder_metas[encoder].measure(shape))
        self._sample = lru_cache(16)(self._read)
        self._tokenised = BoundedCache(_CACHED_TOKENS)
        self._arrays = BoundedCache(_CACHED_BYTES)

    def __getstate__(self) -> dict[str, Any]:
        caches = ("_measure", "_sample", "_tokenised", "_arrays")
        return {key: value for key, value in self.__dict__.items() if key not in caches}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_caches()

    def __len__(self) -> int:
        return int(self._stops[-1])

    @property
    def skipped(self) -> Counter[str]:
        """Rows left out as far as the index is known, by reason."""
        return sum((index.skipped for index in self._indexes), Counter())

    @property
    def fingerprint(self) -> str:
        """Changes when the number, the order or the measures of the samples change."""
        parts = [index.digest() for index in self._indexes]
        return hashlib.sha256("".join(parts).encode()).hexdigest()[:32]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each source."""
        return tuple(stop - start for start, stop in self.source_ranges)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names that the rows give in their column `task`, "" for rows without one; sorted."""
        parts = [part for index in self._indexes for part in index.known]
        return tuple(sorted({part.task_names[task] for part in parts for task in np.unique(part.tasks)}))

    def _find(self, row: int) -> tuple[Measurer, IndexPart, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"sample {row} of {len(self)}")
        number = int(np.searchsorted(self._stops, row, side="right"))
        part, local = self._indexes[number].find(row - self.source_ranges[number][0])
        return self._measurers[number], part, local

    def where(self, row: int) -> str:
        """File and row (or line) of a sample, for messages."""
        measurer, index, local = self._find(row)
        return measurer.source.location(int(index.rows[local]))

    def meta(self, row: int) -> SampleMeta:
        """Numbers of one sample; nothing is read."""
        _, index, local = self._find(row)
        items = []
        for ordinal, known in enumerate(index.items(local)):
            segments, rows = self._measure(known.encoder, known.shape)
            items.append(
                Item(
                    row,
                    ordinal,
                    known.encoder,
                    known.shape,
                    segments,
                    rows,
                    known.spans,
                    seconds=known.seconds,
                    times=known.times,
                )
            )
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
        """Token ids and labels, exactly as measured. RowError when the data file has changed since."""
        meta = self.meta(row)
        planned = [Planned(item.shape, item.seconds, item.times, item.rows) for item in meta.items]
        changed = f"{self.where(row)}; start again to index the new content"
        try:
            tokenised = self._tokenised.get(
                row,
                lambda: self.text.tokenise(self._sample(row), planned, verify=False),
                lambda made: len(made.ids),
            )
            input_ids, labels, spans = tokenised.expand([item.rows for item in meta.items])
        except (RowError, ValueError, OSError) as error:
            raise RowError("row has changed since it was indexed", f"{changed} ({error})") from None
        if (
            len(input_ids) != meta.tokens
            or int((labels >= 0).sum()) != meta.target_tokens
            or spans != tuple(item.spans for item in meta.items)
        ):
            raise RowError("row has changed since it was indexed", changed)
        return EncodedSample(input_ids, labels, meta, self.text.positions(meta))

    def load_media(self, row: int, ordinal: int, parts: Parts | None = None) -> np.ndarray:
        """float32 of the planned shape, image [3, height, width], video [3, frames, height, width], audio
        [n_mels, frames]; not to be changed. parts: (start, length) of what is wanted along the first side,
        joined in this order; None: the whole.

        MediaError when it cannot be decoded.
        """
        item = self.meta(row).items[ordinal]
        whole = parts is None or parts == ((0, item.shape[0]),)
        preprocess = self.media[item.encoder]
        try:
            ref = self._sample(row).media[ordinal]
            name = ref.path if ref.path is not None else (row, ordinal)
            if len(item.shape) == 3 and not whole:  # frames that others encode need not be decoded
                return preprocess.load_frames(ref, item.shape, _numbers(parts))
            value = self._arrays.get(
                (item.encoder, name, item.shape),
                lambda: preprocess.load(ref, item.shape),
                lambda made: made.nbytes,
            )
            return value if whole else value[:, _numbers(parts)]
        except RowError as error:
            raise MediaError(error.reason, f"{self.where(row)}: {error.detail}") from None

    def blank_media(self, row: int, ordinal: int, parts: Parts | None = None) -> np.ndarray:
        """Zeros in the place of a medium that cannot be loaded."""
        item = self.meta(row).items[ordinal]
        if parts is None:
            return self.media[item.encoder].blank(item.shape)
        return self.media[item.encoder].blank((sum(length for _, length in parts), *item.shape[1:]))

    def describe(self) -> str:
        """Samples, tokens and skips of each source as far as the index is known, a line each."""
        lines = []
        for measurer, index in zip(self._measurers, self._indexes, strict=True):
            parts = index.known
            samples, tokens, targets, media = (
                sum(int(count) for count in counts)
                for counts in (
                    [len(part) for part in parts],
                    [part.tokens.sum() for part in parts],
                    [part.target_tokens.sum() for part in parts],
                    [len(part.item_encoders) for part in parts],
                )
            )
            skipped = ", ".join(f"{count} {reason}" for reason, count in index.skipped.most_common())
            lines.append(
                f"{measurer.source.name}: {samples} samples, {tokens} tokens, {targets} of them targets, "
                f"{media} media"
                + (f"; skipped: {skipped}" if skipped else "")
                + ("" if index.complete else f"; indexed so far, of {measurer.rows} rows")
            )
        return "\n".join(lines)
