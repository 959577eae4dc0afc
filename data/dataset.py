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
from data.index_store import SourceIndex
from data.preprocess import Preprocess
from data.rows import Sample
from data.text import TextProcessor
from omni_ds.plan.sample import Item, SampleMeta

_CACHED_TOKENS = 4_000_000  # per process, 9 bytes each
_CACHED_BYTES = 64 * 2**20  # of preprocessed media, per process


@dataclass(frozen=True)
class EncodedSample:
    """input_ids: int64 [tokens]. labels: int64 [tokens], at t what t predicts, -100 for nothing."""

    input_ids: np.ndarray
    labels: np.ndarray
    meta: SampleMeta


class IndexedDataset:
    """Usable samples of one or more sources, numbered through from 0.

    source_ranges: (start, stop) of each source's samples. weights: of each source. skipped: rows left out, by
    reason. text, media, encoder_metas: what the samples were measured with.
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
        names = {index.task_names[task] for index in self._indexes for task in set(index.tasks.tolist())}
        return tuple(sorted(names))

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
        """Token ids and labels, exactly as measured. RowError when the data file has changed since."""
        meta = self.meta(row)
        changed = f"{self.where(row)}; start again to index the new content"
        try:
            tokenised = self._tokenised.get(
                row,
                lambda: self.text.tokenise(self._sample(row), verify=False),
                lambda made: len(made.ids),
            )
            input_ids, labels, offsets = tokenised.expand([item.rows for item in meta.items])
        except (RowError, ValueError, OSError) as error:
            raise RowError("row has changed since it was indexed", f"{changed} ({error})") from None
        spans = tuple(item.spans[0][0] for item in meta.items)
        if (
            len(input_ids) != meta.tokens
            or int((labels >= 0).sum()) != meta.target_tokens
            or offsets != spans
        ):
            raise RowError("row has changed since it was indexed", changed)
        return EncodedSample(input_ids, labels, meta)

    def load_media(self, row: int, ordinal: int) -> np.ndarray:
        """float32 of the planned shape, image [3, height, width], audio [n_mels, frames]; not to be changed.

        MediaError when it cannot be decoded.
        """
        item = self.meta(row).items[ordinal]
        try:
            ref = self._sample(row).media[ordinal]
            name = ref.path if ref.path is not None else (row, ordinal)
            return self._arrays.get(
                (item.encoder, name, item.shape),
                lambda: self.media[item.encoder].load(ref, item.shape),
                lambda made: made.nbytes,
            )
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
