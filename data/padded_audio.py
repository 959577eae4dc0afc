"""Clips for towers that hide padding from attention: HF's features of a padded clip, cut behind its sound."""

from typing import Any

import numpy as np

from data.errors import MediaError
from data.media import MediaHeader, MediaRef, decode_audio
from data.planned import Preprocess


class PaddedAudioPreprocess(Preprocess):
    """A Whisper feature extractor that fills its window with silence.

    reach: frames behind the sound that the tower's convolutions see. max_seconds: longer clips are refused,
    as are those longer than the window, which HF would cut.
    """

    modality = "audio"

    def __init__(self, processor: Any, max_seconds: float, reach: int):
        self.processor = processor
        self.max_seconds = min(max_seconds, processor.n_samples / processor.sampling_rate)
        self.reach = reach
        self.settings = self.max_seconds

    def plan_shape(self, header: MediaHeader) -> tuple[int]:
        seconds = header.samples / header.sampling_rate
        if seconds > self.max_seconds:
            raise MediaError(
                "audio longer than max_seconds", f"{seconds:.1f} s; at most {self.max_seconds:g} are taken"
            )
        samples = -(-header.samples * self.processor.sampling_rate // header.sampling_rate)
        return (-(-samples // self.processor.hop_length) + self.reach,)

    def load(self, ref: MediaRef, shape: tuple[int, ...]) -> np.ndarray:
        samples = decode_audio(ref, self.processor.sampling_rate)
        samples = samples[: (shape[0] - self.reach) * self.processor.hop_length]
        # HF pads to the window; no frame that is kept sees more silence than this.
        silent = len(samples) + (self.reach + 1) * self.processor.hop_length + self.processor.n_fft
        features = self.processor(
            samples,
            sampling_rate=self.processor.sampling_rate,
            padding="max_length",
            max_length=min(silent, self.processor.n_samples),
            return_tensors="np",
        )["input_features"][0]
        result = self.blank(shape)
        features = features[:, : shape[0]]
        result[:, : features.shape[1]] = features
        return result

    def blank(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros((self.processor.feature_size, *shape), dtype=np.float32)
