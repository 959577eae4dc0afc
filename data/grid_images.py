"""Images of any size for towers that take them so: Qwen2-VL's image processor."""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from data.errors import MediaError
from data.media import MediaHeader, MediaRef, decode_image
from data.planned import Preprocess
from omni_ds.errors import UserError


class GridImagePreprocess(Preprocess):
    """An HF image processor that keeps proportions, rounds sides to whole cells and bounds the pixels.

    The processor returns patches in the order of the tower; the image is put together of them again, so that
    its shape is that of a picture wherever it is planned with.
    """

    modality = "image"

    def __init__(self, processor: Any):
        self.processor = processor
        self.side = processor.patch_size * processor.merge_size
        size = dict(processor.size)
        self._bounds = size["shortest_edge"], size["longest_edge"]
        self._resized = sys.modules[type(processor).__module__].smart_resize

    def plan_shape(self, header: MediaHeader) -> tuple[int, int]:
        try:
            height, width = self._resized(header.height, header.width, self.side, *self._bounds)
        except ValueError as error:
            raise MediaError(
                "image cannot be resized", f"{header.height} x {header.width}: {error}"
            ) from None
        return height, width

    def load(self, ref: MediaRef, shape: tuple[int, ...]) -> np.ndarray:
        image = decode_image(ref)
        try:
            made = self.processor(image, return_tensors="np")
        except ValueError as error:
            raise MediaError("image cannot be resized", f"{ref} {image.size}: {error}") from None
        _, rows, columns = made["image_grid_thw"][0].tolist()
        patch, merge = self.processor.patch_size, self.processor.merge_size
        if (rows * patch, columns * patch) != shape:
            raise MediaError("image has changed since it was indexed", str(ref))
        cells = (rows // merge, columns // merge, merge, merge, 3, -1, patch, patch)
        frame = made["pixel_values"].reshape(cells)[:, :, :, :, :, 0]
        pixels = frame.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, *shape)
        return np.ascontiguousarray(pixels, dtype=np.float32)

    def blank(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros((3, *shape), dtype=np.float32)


def grid_preprocess(
    where: str, processor: Any, encoder: Any, hf_config: Mapping[str, Any]
) -> GridImagePreprocess:
    """Of a checkpoint's image processor (None: it has none), within the configuration's bounds of pixels."""
    if processor is None:
        raise UserError(f"{where}: {encoder.path} has no preprocessor_config.json; copy it there")
    cells = {"patch_size": hf_config["patch_size"], "merge_size": hf_config["spatial_merge_size"]}
    for key, value in cells.items():
        if getattr(processor, key, None) != value:
            raise UserError(
                f"{where}: the tower has {key} {value}, the image processor of {encoder.path} "
                f"{getattr(processor, key, None)}; use the processor of the same checkpoint"
            )
    bounds = {"shortest_edge": encoder.processor.min_pixels, "longest_edge": encoder.processor.max_pixels}
    size = dict(processor.size) | {key: value for key, value in bounds.items() if value is not None}
    if size["shortest_edge"] > size["longest_edge"]:
        raise UserError(
            f"{where}.processor: an image has at least {size['shortest_edge']} and at most "
            f"{size['longest_edge']} pixels; set min_pixels and max_pixels"
        )
    processor.size = type(processor.size)(**size)
    return GridImagePreprocess(processor)
