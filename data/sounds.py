"""The sound of videos as media of their own: which there is, and where its feature rows stand among theirs.

The order of the rows is that of transformers' Qwen2_5OmniProcessor and Qwen3OmniMoeProcessor with
``load_audio_from_video``.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from data.audio_track import has_track
from data.media import MediaRef
from data.media_words import placed
from data.rows import RowReader, Sample
from omni_ds.plan.clock import Clock


class SoundReader:
    """A `RowReader` whose samples have, behind their media, the sound of each video that has any."""

    def __init__(self, reader: RowReader):
        self.reader = reader

    def read(self, raw: Any) -> Sample:
        """RowError as of the reader, MediaError when a video file cannot be opened."""
        sample = self.reader.read(raw)
        videos = [ref for ref in sample.media if ref.modality == "video" and ref.frames is None]
        sounds = tuple(ref.sound() for ref in videos if _sounds(ref))
        return replace(sample, media=sample.media + sounds) if sounds else sample


def _sounds(ref: MediaRef) -> bool:
    return _file_sounds(ref.path) if ref.path is not None else has_track(ref)


@lru_cache(100_000)
def _file_sounds(path: str) -> bool:
    return has_track(MediaRef("video", path=path))


def sounds_of_videos(media: Sequence[MediaRef]) -> dict[int, int]:
    """Ordinal of a video -> that of its sound."""
    sounds = iter([number for number, ref in enumerate(media) if ref.track])
    waiting, found = next(sounds, None), {}
    for number, ref in placed(media):
        if waiting is not None and ref.modality == "video" and _same(ref, media[waiting]):
            found[number], waiting = waiting, next(sounds, None)
    assert waiting is None, "a sound without its video"
    return found


def _same(video: MediaRef, sound: MediaRef) -> bool:
    return video.frames is None and (video.path, video.content) == (sound.path, sound.content)


def interleaved(
    steps: int, cells: int, seconds: float, sounds: int, clock: Clock
) -> tuple[tuple[bool, int], ...]:
    """Runs of feature rows (of the sound?, how many) of a video of `steps` x `cells` rows, a step every so
    many seconds, and of its sound of `sounds` rows, each of one position."""
    times = np.arange(steps) * seconds * clock.per_second
    runs: list[tuple[bool, int]] = []
    if clock.chunk:
        of_video, of_sound = (_cut(t, clock.chunk) for t in (np.repeat(times, cells), np.arange(sounds)))
        for number in range(max(len(of_video), len(of_sound))):
            for sound, counts in ((False, of_video), (True, of_sound)):
                if number < len(counts):
                    runs.append((sound, counts[number]))
        return tuple(runs)
    heard = 0
    for time in times.tolist():
        until = min(sounds, int(np.ceil(time)))
        runs += [(True, until - heard), (False, cells)]
        heard = max(heard, until)
    return _joined([*runs, (True, sounds - heard)])


def _cut(times: np.ndarray, chunk: int) -> list[int]:
    """Rows of each chunk. A row opens at most one: behind a longer pause the next row opens another."""
    starts, limit = [0], chunk
    for row, time in enumerate(times.tolist()):
        if time >= limit:
            starts.append(row)
            limit += chunk
    return [stop - start for start, stop in pairwise([*starts, len(times)])]


def _joined(runs: Sequence[tuple[bool, int]]) -> tuple[tuple[bool, int], ...]:
    joined: list[tuple[bool, int]] = []
    for sound, count in runs:
        if count > 0 and joined and joined[-1][0] == sound:
            joined[-1] = (sound, joined[-1][1] + count)
        elif count > 0:
            joined.append((sound, count))
    return tuple(joined)
