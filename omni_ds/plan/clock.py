"""How a model that sees and hears counts time in the positions of its tokens (TMRoPE)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """Of Qwen2.5-Omni and Qwen3-Omni.

    Attributes:
        per_second: positions that a second of video has.
        chunk: positions of a video whose rows stand together, followed by those of its sound (Qwen2.5-Omni);
            0: the rows of a video and its sound stand in the order of their times, and positions in time may
            be fractions (Qwen3-Omni).
        start, end: ids of the tokens around the sound of a video.
    """

    per_second: float
    chunk: int
    start: int
    end: int
