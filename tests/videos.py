"""Small video files for tests, written with PyAV."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

TICKS = 1000  # of a second, in which times are given


def write_video(
    target: Any,
    frames: Sequence[np.ndarray],
    times: Sequence[int],
    *,
    rotation: float | None = None,
    hflip: bool = False,
    keys: int = 250,
    form: str = "mp4",
    sound: np.ndarray | None = None,
    rate: int = 16000,
) -> Any:
    """Frames uint8 [height, width, 3] shown at `times` (milliseconds); returns the target, a path or a file.

    rotation: counter-clockwise, in the display matrix. keys: at most so many frames from key frame to key
    frame. sound: float [samples] in [-1, 1].
    """
    import av

    container = av.open(str(target) if isinstance(target, str | Path) else target, "w", format=form)
    height, width = frames[0].shape[:2]
    stream = container.add_stream("libx264", rate=max(1, round(len(frames) * TICKS / (times[-1] + 40))))
    stream.width, stream.height, stream.pix_fmt = width, height, "yuv444p"
    stream.codec_context.time_base = stream.time_base = Fraction(1, TICKS)
    stream.codec_context.options = {"qp": "0", "g": str(keys), "sc_threshold": "0", "threads": "1"}
    if rotation is not None or hflip:
        stream.set_display_rotation(rotation or 0, hflip=hflip)
    track = (
        None
        if sound is None
        else container.add_stream("flac" if form == "matroska" else "aac", rate=rate, layout="mono")
    )
    for pixels, time in zip(frames, times, strict=True):
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        frame.pts, frame.time_base = time, Fraction(1, TICKS)
        container.mux(stream.encode(frame))
    container.mux(stream.encode())
    if track is not None:
        values = (np.asarray(sound) * 32767).astype(np.int16)[None]
        clip = av.AudioFrame.from_ndarray(values, format="s16", layout="mono")
        clip.sample_rate, clip.pts = rate, 0
        shaped = av.AudioResampler(
            format=track.codec_context.format, layout="mono", rate=rate, frame_size=1024
        )
        for piece in [*shaped.resample(clip), *shaped.resample(None)]:
            container.mux(track.encode(piece))
        container.mux(track.encode())
    container.close()
    return target


def numbered(count: int, height: int = 16, width: int = 24) -> list[np.ndarray]:
    """Frames that differ: grey of the frame's number, the upper left quarter red."""
    frames = []
    for number in range(count):
        frame = np.full((height, width, 3), 5 + number * 240 // count, dtype=np.uint8)
        frame[: height // 2, : width // 2] = 200, 20, 30
        frames.append(frame)
    return frames


def number_of(image: Any, count: int) -> int:
    """Which frame of `numbered` a picture is, by its grey."""
    grey = np.median(np.asarray(image).reshape(-1, 3), axis=0).mean()
    return round((grey - 5) * count / 240)
