"""A sample's token ids before its media have their places."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.labels import shift_labels

Runs = tuple[tuple[int, int | None], ...]
"""(ordinal of its medium, its feature rows or None: all) of each run of placeholders."""


@dataclass(frozen=True)
class Tokenised:
    """A sample with one placeholder token for each run of a medium's feature rows.

    ids: int64 [t]. targets: bool [t], True where the token is to be predicted. slots: token position of each
    run's placeholder, increasing. runs: of each; none given: every medium in its order is one run.
    """

    ids: np.ndarray
    targets: np.ndarray
    slots: tuple[int, ...]
    runs: Runs | None = None

    def expand(
        self, rows: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, tuple[tuple[tuple[int, int], ...], ...]]:
        """(input_ids int64 [T], labels int64 [T], spans (offset, length) of each medium) when the media have
        so many feature rows.

        labels are shifted: labels[t] is the token that position t predicts, -100 where there is none.
        """
        runs = [(ordinal, None) for ordinal in range(len(rows))] if self.runs is None else self.runs
        lengths = [rows[ordinal] if length is None else length for ordinal, length in runs]
        repeats = np.ones(len(self.ids), dtype=np.int64)
        repeats[list(self.slots)] = lengths
        offsets = np.cumsum(repeats) - repeats
        input_ids = np.repeat(self.ids, repeats)
        labels = shift_labels(input_ids, np.repeat(self.targets, repeats))
        spans: list[list[tuple[int, int]]] = [[] for _ in rows]
        for slot, (ordinal, _), length in zip(self.slots, runs, lengths, strict=True):
            spans[ordinal].append((int(offsets[slot]), length))
        for places, count in zip(spans, rows, strict=True):
            assert sum(length for _, length in places) == count, f"{places} for {count} feature rows"
        return input_ids, labels, tuple(map(tuple, spans))
