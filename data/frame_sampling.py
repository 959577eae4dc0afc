"""Which frames of a video are taken: the formulas of transformers' video processors."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from data.media import MediaHeader

_SAME = 0.25  # of the time between frames: less than that is rounding, not a variable rate


@dataclass(frozen=True)
class FrameSampling:
    """fps: frames taken per second, of at least `min_frames` and at most `max_frames` in all, a multiple of
    `multiple`, as far as the video has so many."""

    fps: float
    min_frames: int
    max_frames: int
    multiple: int


Formula = Callable[[int, float, FrameSampling], np.ndarray]
"""(frames of a video, its frames per second, sampling) -> numbers of the frames taken, int64."""


def evenly(total: int, fps: float, sampling: FrameSampling) -> np.ndarray:
    """As Qwen2VLVideoProcessor.sample_frames, which fails where this takes the one frame there is."""
    import torch  # its arange, for its rounding

    most = math.floor(min(sampling.max_frames, total) / sampling.multiple) * sampling.multiple
    count = min(max(total / fps * sampling.fps, sampling.min_frames), most, total)
    count = math.floor(count / sampling.multiple) * sampling.multiple
    if not count:
        return np.arange(min(total, sampling.multiple))
    return torch.arange(0, total, total / count).int().numpy().astype(np.int64)


def sample_frames(
    header: MediaHeader, sampling: FrameSampling, formula: Formula = evenly
) -> tuple[np.ndarray, float]:
    """(numbers of the frames taken, int64, not decreasing; how many of them make a second).

    The formula counts frames of equal duration; where a file's differ, the frame nearest in time is taken. Of
    a list, all frames are taken unless there are more than `max_frames`, or more in a second than `fps`. One
    that does not say its rate is taken to have `fps`.
    """
    total, fps = len(header.times), header.fps or sampling.fps
    if header.listed and total <= sampling.max_frames and fps <= sampling.fps:
        return np.arange(total), fps
    chosen = formula(total, fps, sampling)
    rate = len(chosen) / total * fps
    steady = np.arange(total) / fps
    if _is_steady(header, fps) or header.listed:
        return chosen, rate
    return nearest(header.times, steady[chosen]), rate


def shown_times(header: MediaHeader, taken: np.ndarray, sampling: FrameSampling) -> np.ndarray:
    """Seconds at which frames of these numbers are shown, float64; by number where durations are equal."""
    fps = header.fps or sampling.fps
    return taken / fps if _is_steady(header, fps) or header.listed else header.times[taken]


def _is_steady(header: MediaHeader, fps: float) -> bool:
    return np.abs(header.times - np.arange(len(header.times)) / fps).max() <= _SAME / fps


def nearest(times: np.ndarray, wanted: Sequence[float]) -> np.ndarray:
    """Numbers of the times (increasing) nearest to those wanted, the earlier of two, int64."""
    after = np.searchsorted(times, wanted).clip(1, max(1, len(times) - 1))
    if len(times) == 1:
        return np.zeros(len(after), dtype=np.int64)
    before = after - 1
    return np.where(wanted - times[before] <= times[after] - wanted, before, after)
