"""Decoding of media as in training: RGB images as displayed, mono clips at the encoder's rate."""

import math

import numpy as np
from PIL import Image, ImageOps


def read_image(image):
    """RGB PIL image out of a PIL image, a uint8 array [height, width(, channels)] or a path."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    elif not isinstance(image, Image.Image):
        image = Image.open(image)
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # PIL would clip 16 bits to 8, not scale them
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def read_audio(clip, sampling_rate, wanted_rate):
    """Mono float32 samples at `wanted_rate` Hz out of an array [samples(, channels)] or a path.

    sampling_rate: of an array, in Hz; None: `wanted_rate`. Paths need soundfile, another rate needs soxr.
    """
    if hasattr(clip, "__array__"):
        samples, rate = np.asarray(clip, dtype=np.float32), sampling_rate or wanted_rate
    else:
        import soundfile

        samples, rate = soundfile.read(clip, dtype="float32")
    if samples.ndim == 2:
        samples = samples.mean(axis=1)
    if rate == wanted_rate:
        return samples
    import soxr

    return soxr.resample(samples, rate, wanted_rate).astype(np.float32)


def whisper_samples(samples, extractor, pad_to_window):
    """Samples cut or padded with silence for the extractor, and how many of its mel frames to keep.

    Without pad_to_window a clip keeps its own duration: at least one frame and what the STFT's reflection
    needs.
    """
    count = len(samples)
    if pad_to_window:
        count = math.ceil(count / extractor.n_samples) * extractor.n_samples
    reflection = extractor.n_fft // 2 + 1
    frames = max(count, reflection, extractor.hop_length) // extractor.hop_length
    wanted = max(frames * extractor.hop_length, reflection)
    samples = samples[: wanted + extractor.hop_length - 1]
    return np.pad(samples, (0, max(0, wanted - len(samples)))), frames
