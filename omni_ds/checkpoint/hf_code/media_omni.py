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


def smart_size(height, width, block, min_pixels=None, max_pixels=None):
    """(height, width) of an image resized to multiples of `block` at its own proportions.

    The "smart resize" of Qwen2-VL (arXiv:2409.12191) in whole numbers: nearest multiples; where their area is
    out of bounds, the sides are scaled by the root of (bound / area) and rounded down, or up. `max_pixels`
    holds for images of any proportions.
    """
    rows, columns = max(1, round(height / block)), max(1, round(width / block))
    area = block * block
    if rows * columns * area < (min_pixels or 1):
        rows = math.isqrt(-(-height * min_pixels // (width * area)) - 1) + 1
        columns = math.isqrt(-(-width * min_pixels // (height * area)) - 1) + 1
    if max_pixels is not None and rows * columns * area > max_pixels:
        most = max_pixels // area
        rows = max(1, math.isqrt(height * max_pixels // (width * area)))
        columns = max(1, math.isqrt(width * max_pixels // (height * area)))
        rows, columns = min(rows, most), min(columns, most)  # only where the other one is 1
    return rows * block, columns * block


def native_pixels(image, sizing, processor):
    """float32 [3, height, width] of an RGB image at its own proportions, normalised as `processor` says.

    sizing: `block`, and `max_blocks` (SigLIP2's NaFlex rule: as many blocks as fit) or None with the bounds
    `min_pixels` and `max_pixels`.
    """
    if sizing["max_blocks"] is not None:
        from transformers.models.siglip2 import image_processing_pil_siglip2 as naflex

        size = naflex.get_image_size_for_max_num_patches(
            image.height, image.width, sizing["block"], sizing["max_blocks"]
        )
    else:
        bounds = sizing["min_pixels"], sizing["max_pixels"]
        size = smart_size(image.height, image.width, sizing["block"], *bounds)
    resample = Image.Resampling.BILINEAR if processor.resample is None else processor.resample
    values = np.asarray(image.resize(size[::-1], resample))
    if processor.do_rescale:
        values = (values * np.float64(processor.rescale_factor)).astype(np.float32)
    values = values.astype(np.float32)
    if processor.do_normalize:
        mean, deviation = (np.asarray(x, np.float32) for x in (processor.image_mean, processor.image_std))
        values = (values - mean) / deviation
    return np.ascontiguousarray(values.transpose(2, 0, 1))


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
