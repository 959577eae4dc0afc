"""What the plan knows of a sample: numbers only, so that a step can be planned before anything is decoded.

Both types come from the cost index (`data/index.py`) and are equal on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """One medium (image, video, audio clip) of a sample.

    row: dataset row of the sample; ordinal: n-th medium of the sample, in placeholder order. encoder: name of
    the encoder. shape: of the preprocessed medium, image (height, width) in pixels, video (frames, height,
    width), image as tiles as its tower has it, audio (mel_frames,). segments: lengths in encoder tokens of
    the runs that attend to each other. rows: feature rows the LLM receives. spans: where they go, (offset in
    the sample's tokens, length) each; the lengths add up to rows. start: where it begins in the medium, in
    (mel) frames or tiles; more than 0 for a later part of a long video, image or recording. gang: number of
    ranks that encode the medium together, of which this is slice `slice`: then rows and spans are those of
    the slice, all else of the whole (long_short.py). Of a video, seconds: from one step of its grid in time
    to the next; times: of its steps where the text says them.
    """

    row: int
    ordinal: int
    encoder: str
    shape: tuple[int, ...]
    segments: tuple[int, ...]
    rows: int
    spans: tuple[tuple[int, int], ...]
    start: int = 0
    gang: int = 1
    slice: int = 0
    seconds: float = 0.0
    times: tuple[float, ...] = ()

    @property
    def sizes(self) -> tuple[int, int]:
        """Encoder tokens, and their squares summed over segments, that fall to whoever encodes this."""
        return sum(self.segments) // self.gang, sum([n * n for n in self.segments]) // self.gang


@dataclass(frozen=True)
class SampleMeta:
    """One sample: tokens after tokenizer and processor, of which target_tokens are predicted."""

    row: int
    tokens: int
    target_tokens: int
    items: tuple[Item, ...]
    task: str = ""
