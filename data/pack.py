"""Token ids, positions and targets of a micro-batch: its samples one after the other, without padding."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from data.dataset import EncodedSample, IndexedDataset
from data.errors import RowError
from data.labels import IGNORED
from omni_ds.plan.batch import MicroBatch
from omni_ds.plan.sample import SampleMeta

Failed = tuple[int, str]
"""(dataset row, reason)."""


@dataclass(frozen=True)
class PackedNumpy:
    """A micro-batch of n samples, T tokens, N targets and R feature rows; empty ones have T = 0 and n = 0.

    input_ids, position_ids (from 0 in each sample): int64 [T]; positions of k kinds [k, T]. cu_seqlens: int32
    [n + 1]. The logits at target_positions int64 [N] predict target_ids int64 [N], which belong to samples
    sample_of_target int64 [N]. feature_positions: int64 [R], increasing: where feature rows take the place of
    placeholder embeddings. spans: (first, length) of tokens that see each other in both directions.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    cu_seqlens: np.ndarray
    target_positions: np.ndarray
    target_ids: np.ndarray
    sample_of_target: np.ndarray
    feature_positions: np.ndarray
    spans: tuple[tuple[int, int], ...] = ()


def pack(dataset: IndexedDataset, micro_batch: MicroBatch) -> tuple[PackedNumpy, list[Failed]]:
    """Encode and pack. A sample that cannot be encoded any more keeps its length, has no targets, and is
    reported.
    """
    samples, failed = [], []
    for meta in micro_batch.samples:
        try:
            samples.append(dataset.encode(meta.row))
        except RowError as error:
            failed.append((meta.row, str(error)))
            blank = np.zeros(meta.tokens, dtype=np.int64)
            samples.append(
                EncodedSample(
                    blank, np.full_like(blank, IGNORED), meta, dataset.text.positions(dataset.meta(meta.row))
                )
            )
    return pack_samples(samples, micro_batch.cu_seqlens, blocks=dataset.text.blocks), failed


def pack_samples(
    samples: list[EncodedSample], cu_seqlens: tuple[int, ...], *, blocks: bool = False
) -> PackedNumpy:
    """blocks: consecutive feature rows of a sample are a span."""
    labels = _joined(sample.labels for sample in samples)
    targets = np.flatnonzero(labels != IGNORED)
    cu_seqlens = np.array(cu_seqlens, dtype=np.int32)
    features = [feature_positions(sample.meta) for sample in samples]
    starts = cu_seqlens[:-1].tolist()
    return PackedNumpy(
        input_ids=_joined(sample.input_ids for sample in samples),
        position_ids=_joined_positions([sample.positions for sample in samples]),
        cu_seqlens=cu_seqlens,
        target_positions=targets,
        target_ids=labels[targets],
        sample_of_target=np.searchsorted(cu_seqlens, targets, side="right").astype(np.int64) - 1,
        feature_positions=_joined(start + rows for start, rows in zip(starts, features, strict=True)),
        spans=tuple(
            (start + first, length)
            for start, rows in zip(starts, features, strict=True)
            for first, length in (_runs(rows) if blocks else ())
        ),
    )


def _runs(positions: np.ndarray) -> list[tuple[int, int]]:
    """(first, length) of each run of consecutive numbers."""
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return [(int(run[0]), len(run)) for run in runs if len(run)]


def feature_positions(meta: SampleMeta) -> np.ndarray:
    """Positions in one sample that hold feature rows, increasing, int64."""
    spans = sorted(span for item in meta.items for span in item.spans)
    return _joined(np.arange(offset, offset + length) for offset, length in spans)


def _joined_positions(positions: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(positions, axis=-1) if positions else np.zeros(0, dtype=np.int64)


def _joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *arrays])
