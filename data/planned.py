"""What preprocessing of one encoder is: from the header of a medium to its shape, and to numbers of it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.media import MediaHeader, MediaRef


@dataclass(frozen=True)
class Planned:
    """A medium before it is decoded.

    shape: image (height, width) in pixels, video (frames, height, width), audio (mel frames,). Of a video,
    seconds: from one step of its grid in time to the next; times: of its steps where the text says them.
    rows: features of the encoder; 0 until it has measured the shape.
    """

    shape: tuple[int, ...]
    seconds: float = 0.0
    times: tuple[float, ...] = ()
    rows: int = 0


class Preprocess(ABC):
    """One encoder's preprocessing of one medium.

    modality: the medium. processor: the HF object, for the export. settings: what else decides shapes, for
    the index.
    """

    modality: str
    processor: Any
    settings: Any = None

    @abstractmethod
    def plan_shape(self, header: MediaHeader) -> tuple[int, ...]:
        """Image (height, width) in pixels, video (frames, height, width), audio (mel_frames,). MediaError
        when the medium cannot be used."""

    def plan(self, header: MediaHeader) -> Planned:
        """Shape and times; MediaError when the medium cannot be used."""
        return Planned(self.plan_shape(header))

    @abstractmethod
    def load(self, ref: MediaRef, shape: tuple[int, ...]) -> np.ndarray:
        """float32, image [3, height, width], video [3, frames, height, width], audio [n_mels, mel_frames].
        MediaError when it cannot be decoded.
        """

    def load_frames(self, ref: MediaRef, shape: tuple[int, ...], numbers: Sequence[int]) -> np.ndarray:
        """Of a video that is planned with `shape`, the frames of these numbers alone, as `load`."""
        return self.load(ref, shape)[:, list(numbers)]

    @abstractmethod
    def blank(self, shape: tuple[int, ...]) -> np.ndarray:
        """Zeros in the form of `load`, for a medium that failed."""


class SeveralMedia(Preprocess):
    """Preprocessing of an encoder that takes several media: of each its own.

    by_modality: the first is the encoder's main medium.
    """

    def __init__(self, by_modality: Mapping[str, Preprocess]):
        self.by_modality = dict(by_modality)
        self.modality, main = next(iter(self.by_modality.items()))
        self.processor = main.processor
        self.settings = {modality: each.settings for modality, each in self.by_modality.items()}

    def plan_shape(self, header: MediaHeader) -> tuple[int, ...]:
        return self.by_modality[header.modality].plan_shape(header)

    def plan(self, header: MediaHeader) -> Planned:
        return self.by_modality[header.modality].plan(header)

    def load(self, ref: MediaRef, shape: tuple[int, ...]) -> np.ndarray:
        return self.by_modality[ref.modality].load(ref, shape)

    def load_frames(self, ref: MediaRef, shape: tuple[int, ...], numbers: Sequence[int]) -> np.ndarray:
        return self.by_modality[ref.modality].load_frames(ref, shape, numbers)

    def blank(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.by_modality["video" if len(shape) == 3 else self.modality].blank(shape)
