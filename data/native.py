"""Images at their own proportions: resized to whole blocks of patches, rescaled and normalised.

The arithmetic on pixels is that of HF's image processors (PIL back end) with another size. The export does
the same in `omni_ds/checkpoint/hf_code/media_omni.py`.
"""

from typing import Any

import numpy as np
from PIL import Image

from data.errors import MediaError
from data.media import MediaHeader, MediaRef, decode_image
from data.planned import Preprocess
from omni_ds.plan.image_size import Sizing, smart_size


class NativeImagePreprocess(Preprocess):
    """Makes arrays of the size that `sizing` gives an image.

    processor: HF image processor, for resampling, rescaling, mean and deviation.
    """

    modality = "image"

    def __init__(self, processor: Any, sizing: Sizing):
        self.processor = processor
        self.sizing = sizing
        self.settings = sizing

    def plan_shape(self, header: MediaHeader) -> tuple[int, int]:
        return sized(self.sizing, header.height, header.width)

    def load(self, ref: MediaRef, shape: tuple[int, ...]) -> np.ndarray:
        image = decode_image(ref)
        made = sized(self.sizing, image.height, image.width)
        if made != tuple(shape):
            raise MediaError(
                "image has another size than when it was indexed",
                f"{ref}: {image.height} x {image.width} pixels make {made[0]} x {made[1]}, planned were "
                f"{shape[0]} x {shape[1]}",
            )
        return pixel_values(image, made, self.processor)

    def blank(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros((3, *shape), dtype=np.float32)


def sized(sizing: Sizing, height: int, width: int) -> tuple[int, int]:
    """(height, width) in pixels of an image after resizing."""
    if sizing.max_blocks is None:
        return smart_size(height, width, sizing.block, sizing.min_pixels, sizing.max_pixels)
    from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

    return get_image_size_for_max_num_patches(height, width, sizing.block, sizing.max_blocks)


def pixel_values(image: Image.Image, size: tuple[int, int], processor: Any) -> np.ndarray:
    """float32 [3, height, width] of an RGB image."""
    resample = Image.Resampling.BILINEAR if processor.resample is None else processor.resample
    values = np.asarray(image.resize(size[::-1], resample))
    if processor.do_rescale:
        values = (values * np.float64(processor.rescale_factor)).astype(np.float32)
    values = values.astype(np.float32)
    if processor.do_normalize:
        mean, deviation = (np.asarray(x, np.float32) for x in (processor.image_mean, processor.image_std))
        values = (values - mean) / deviation
    return np.ascontiguousarray(values.transpose(2, 0, 1))
