"""Steps made ahead of time in worker processes: the plan, this rank's tokens, and the media this rank
encodes.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data.dataset import IndexedDataset
from data.errors import MediaError
from data.pack import Failed, PackedNumpy, pack
from data.sampler import GlobalBatchSampler
from data.shared_times import SharedTimes
from omni_ds.errors import UserError
from omni_ds.plan.build import Plan, StepPlan, build_step
from omni_ds.plan.reshard import PlacedItem

__all__ = ["EvalLoader", "PackedNumpy", "StepBatch", "StepLoader"]


@dataclass(frozen=True)
class StepBatch:
    """One global batch as one rank sees it.

    packed: micro-batch -> tokens, for every micro-batch of the rank's replica. media: window -> encoder ->
    float32 tensors (image [3, height, width], video or tiles [3, frames, height, width], audio [n_mels,
    frames]) of the rank's share, in share order; no entry where it has none. long_media: window -> of the
    media that it encodes slices of (work_of) the pixel rows that it needs (EncoderMeta.slice_pixels). failed:
    (dataset row, reason), one a row, of media that this rank should have decoded (zeros instead) and of rows
    of its replica that are no longer what was indexed. plan_seconds: what planning the step took.
    """

    step_plan: StepPlan
    packed: dict[int, PackedNumpy]
    media: dict[int, dict[str, list[torch.Tensor]]]
    failed: tuple[Failed, ...]
    plan_seconds: float = 0.0
    long_media: dict[int, list[torch.Tensor]] = field(default_factory=dict)


def work_of(step_plan: StepPlan, rank: int, window: int) -> Iterator[PlacedItem]:
    """What a rank encodes in a window: whole items of its replica, then slices, its own replica's first."""
    shares = step_plan.shares(rank, window)
    yield from shares[0][1].whole
    for _, share in shares:
        yield from share.slices


@dataclass
class _Wire:
    """A StepBatch on its way out of a worker: all media in one buffer, because every tensor costs a file
    handle.

    layout: (window, encoder, shape, sliced) of each medium in the buffer; sliced: for a gang.
    """

    step_plan: StepPlan
    packed: dict[int, PackedNumpy]
    buffer: torch.Tensor
    layout: list[tuple[int, str, tuple[int, ...], bool]]
    failed: tuple[Failed, ...] = field(default=())
    plan_seconds: float = 0.0

    def pin_memory(self) -> "_Wire":
        self.buffer = self.buffer.pin_memory()
        return self

    def batch(self) -> StepBatch:
        media: dict[int, dict[str, list[torch.Tensor]]] = {}
        long_media: dict[int, list[torch.Tensor]] = {}
        start = 0
        for window, encoder, shape, sliced in self.layout:
            size = int(np.prod(shape))
            value = self.buffer[start : start + size].view(shape)
            if sliced:
                long_media.setdefault(window, []).append(value)
            else:
                media.setdefault(window, {}).setdefault(encoder, []).append(value)
            start += size
        return StepBatch(self.step_plan, self.packed, media, self.failed, self.plan_seconds, long_media)


class _Steps(Dataset, ABC):
    """Steps by number; runs in the workers."""

    times: SharedTimes | None = None

    def __init__(self, dataset: IndexedDataset, plan: Plan, rank: int, *, forward_only: bool):
        self.dataset, self.plan, self.rank, self.forward_only = dataset, plan, rank, forward_only

    @abstractmethod
    def rows(self, step: int) -> Sequence[int]:
        """Dataset rows of a step."""

    def __getitem__(self, step: int) -> "_Wire | UserError":
        try:
            return self._make(step)
        except UserError as error:  # as a value: DataLoader would wrap it in the worker's traceback
            return error

    def _make(self, step: int) -> _Wire:
        metas = self.dataset.metas(self.rows(step))
        started = time.perf_counter()
        # Step numbers count from 0 here and from 1 everywhere a user sees them.
        times = None if self.times is None else self.times.at(step + 1)
        step_plan = build_step(self.plan, step, metas, forward_only=self.forward_only, times=times)
        plan_seconds = time.perf_counter() - started
        replica = step_plan.replica_of(self.rank)
        packed, failed = {}, {}
        for micro_batch in replica.micro_batches:
            packed[micro_batch.index], lost = pack(self.dataset, micro_batch)
            failed |= dict(lost)
        layout, values = [], []
        encoders = {meta.name: meta for meta in self.plan.encoders}
        for window in replica.windows:
            work = (placed.item for placed in work_of(step_plan, self.rank, window.index))
            # Parts of one medium follow each other.
            for (row, ordinal), group in groupby(work, key=lambda item: (item.row, item.ordinal)):
                items = list(group)
                cut = bool(encoders[items[0].encoder].segments_per_slice)
                places = [(item.start, item.shape[0]) for item in items] if cut else None
                parts, reason = self._decoded(row, ordinal, places)
                if reason is not None:
                    failed[row] = reason
                for item in items:
                    value = parts[item.start]
                    if item.gang > 1:
                        first, stop = encoders[item.encoder].slice_pixels(item.shape, item.gang, item.slice)
                        value = value[:, first:stop]
                    layout.append((window.index, item.encoder, value.shape, item.gang > 1))
                    values.append(value.ravel())
        buffer = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.float32), *values]))
        return _Wire(step_plan, packed, buffer, layout, tuple(failed.items()), plan_seconds)

    def _decoded(
        self, row: int, ordinal: int, places: Sequence[tuple[int, int]] | None
    ) -> tuple[dict[int, np.ndarray], str | None]:
        """Parts (start, length along the first side) of a medium by start, the whole (None) by 0; zeros in
        their place, and why, when it cannot be decoded."""
        parts = None if places is None else tuple(dict.fromkeys(places))
        try:
            value, reason = self.dataset.load_media(row, ordinal, parts), None
        except MediaError as error:
            value, reason = self.dataset.blank_media(row, ordinal, parts), str(error)
        if parts is None:
            return {0: value}, reason
        found, at = {}, 0
        for start, length in parts:
            found[start] = value[:, at : at + length]
            at += length
        return found, reason


class _TrainingSteps(_Steps):
    def __init__(self, sampler: GlobalBatchSampler, times: SharedTimes | None, *arguments):
        super().__init__(*arguments, forward_only=False)
        self.sampler = sampler
        self.times = times

    def rows(self, step: int) -> Sequence[int]:
        return self.sampler.rows(step)


class _EvaluationSteps(_Steps):
    def __init__(self, all_rows: Sequence[int], batch_size: int, *arguments):
        super().__init__(*arguments, forward_only=True)
        self.all_rows, self.batch_size = all_rows, batch_size

    def rows(self, step: int) -> Sequence[int]:
        return self.all_rows[step * self.batch_size : (step + 1) * self.batch_size]


class _Loader:
    """Iterates StepBatches of consecutive step numbers; a new iteration starts over."""

    def __init__(self, steps: _Steps, numbers: range, num_workers: int, prefetch: int):
        self.numbers = numbers
        workers = min(num_workers, len(numbers))
        self._loader = DataLoader(
            steps,
            batch_size=None,
            sampler=numbers,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            multiprocessing_context="fork" if workers else None,  # the data set is shared, not copied
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # its own, so that loading draws nothing from the run's random state
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[StepBatch]:
        for wire in self._loader:
            if isinstance(wire, UserError):
                raise wire
            yield wire.batch()


class StepLoader(_Loader):
    """Training steps start_step .. end_step-1 (numbered from 0), as `sampler` draws them and `plan` deals
    them.

    num_workers: processes; 0 makes each step when it is asked for. prefetch: steps ahead, per process. times:
    measured times to plan with.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        sampler: GlobalBatchSampler,
        plan: Plan,
        rank: int,
        start_step: int,
        end_step: int,
        num_workers: int = 0,
        prefetch: int = 2,
        times: SharedTimes | None = None,
    ):
        steps = _TrainingSteps(sampler, times, dataset, plan, rank)
        super().__init__(steps, range(start_step, end_step), num_workers, prefetch)


class EvalLoader(_Loader):
    """Each row once, in order, in forward-only steps of `batch_size` samples (the last may have fewer).

    rows: dataset rows; None means all.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        batch_size: int,
        plan: Plan,
        rank: int,
        num_workers: int = 0,
        prefetch: int = 2,
        rows: Sequence[int] | None = None,
    ):
        rows = range(len(dataset)) if rows is None else rows
        steps = _EvaluationSteps(rows, batch_size, dataset, plan, rank)
        super().__init__(steps, range(-(-len(rows) // batch_size)), num_workers, prefetch)
