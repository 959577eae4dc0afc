"""Images cut into tiles of one size by HF's own processors: of LLaVA-OneVision and of InternVL."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from data.errors import MediaError
from data.media import MediaHeader, MediaRef, decode_image
from data.planned import Preprocess, SeveralMedia
from data.tile_videos import centred, tiled_video_preprocess
from omni_ds.errors import UserError
from omni_ds.plan.encoder_geometry import square_side


class TiledPreprocess(Preprocess):
    """An image as float32 [3, tiles, side, side].

    processor: of HF, PIL back end. side: of a tile in pixels.
    """

    modality = "image"

    def __init__(self, processor: Any, side: int):
        self.processor, self.side = processor, side

    def load(self, ref: MediaRef, shape: tuple[int, ...]) -> np.ndarray:
        image = decode_image(ref)
        if self._shape(image.height, image.width, alone=self._alone(shape)) != tuple(shape):
            raise MediaError("image has changed since it was indexed", str(ref))
        try:
            tiles = self._cut(image, shape)
        except ValueError as error:
            raise MediaError("image cannot be resized", f"{ref} {image.size}: {error}") from None
        return np.ascontiguousarray(np.stack(tiles, axis=1), dtype=np.float32)

    def plan_shape(self, header: MediaHeader) -> tuple[int, ...]:
        return self._shape(header.height, header.width, alone=header.siblings == 1)

    def blank(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros((3, self._tiles(shape), self.side, self.side), dtype=np.float32)

    def _alone(self, shape: tuple[int, ...]) -> bool:
        """Whether an image of this shape is the only one of its row, where that makes a difference."""
        return True

    @abstractmethod
    def _shape(self, height: int, width: int, *, alone: bool) -> tuple[int, ...]:
        """Of an item, for an image of so many pixels."""

    @abstractmethod
    def _tiles(self, shape: tuple[int, ...]) -> int: ...

    @abstractmethod
    def _cut(self, image: Image.Image, shape: tuple[int, ...]) -> np.ndarray:
        """[tiles, 3, side, side], rescaled and normalised."""


class InternVLPreprocess(TiledPreprocess):
    """Shape (tiles, side, side): the grid of tiles whose proportions are nearest, and the whole image behind
    it where there are several. ``InternVLProcessor`` cuts images always, whatever the image processor's own
    ``crop_to_patches``.
    """

    def _shape(self, height: int, width: int, *, alone: bool) -> tuple[int, ...]:
        tiles = self.processor.get_number_of_image_patches(height, width, {"crop_to_patches": True})
        return tiles, self.side, self.side

    def _tiles(self, shape: tuple[int, ...]) -> int:
        return shape[0]

    def _cut(self, image: Image.Image, shape: tuple[int, ...]) -> np.ndarray:
        return self.processor(image, crop_to_patches=True, return_tensors="np")["pixel_values"]


class OneVisionPreprocess(TiledPreprocess):
    """Shape (tiles high, tiles wide, height, width): the whole image, then the tiles of the picture of
    ``image_grid_pinpoints`` that holds most of it. Images of rows with several are the whole image alone,
    padded to a square, with 0 tiles high and wide.
    """

    def _shape(self, height: int, width: int, *, alone: bool) -> tuple[int, ...]:
        from transformers.image_processing_utils import select_best_resolution

        if not alone:
            return 0, 0, height, width
        sides = select_best_resolution((height, width), self.processor.image_grid_pinpoints)
        return *(side // self.side for side in sides), height, width

    def _alone(self, shape: tuple[int, ...]) -> bool:
        return shape[0] > 0

    def _tiles(self, shape: tuple[int, ...]) -> int:
        return 1 + shape[0] * shape[1]

    def _cut(self, image: Image.Image, shape: tuple[int, ...]) -> np.ndarray:
        # Which of the two ways an image goes HF's processor tells by the length of its list.
        images = [image] if self._alone(shape) else [image, Image.new("RGB", (1, 1))]
        return self.processor([images], return_tensors="np")["pixel_values"][0]


def internvl_preprocess(where: str, processor: Any, encoder: Any, config: Mapping[str, Any]) -> Preprocess:
    """Of a checkpoint's image processor (None: it has none); config: of the tower."""
    side = _side(where, processor, encoder, config)
    video = tiled_video_preprocess(where, processor, side, encoder, centred)
    return SeveralMedia({"image": InternVLPreprocess(processor, side), "video": video})


def onevision_preprocess(where: str, processor: Any, encoder: Any, config: Mapping[str, Any]) -> Preprocess:
    """As :func:`internvl_preprocess`."""
    side = _side(where, processor, encoder, config)
    ours, theirs = (
        sorted(map(tuple, pinpoints))
        for pinpoints in (config["image_grid_pinpoints"], processor.image_grid_pinpoints)
    )
    if ours != theirs:
        raise UserError(
            f"{where}: the image processor of {encoder.path} has other image_grid_pinpoints than config.json "
            "has; use the processor of the same checkpoint"
        )
    video = tiled_video_preprocess(where, processor, side, encoder)
    return SeveralMedia({"image": OneVisionPreprocess(processor, side), "video": video})


def _side(where: str, processor: Any, encoder: Any, config: Mapping[str, Any]) -> int:
    """Of a tile; UserError unless processor and tower agree on it."""
    if processor is None:
        raise UserError(f"{where}: {encoder.path} has no preprocessor_config.json; copy it there")
    side = square_side(where, "image_size", config["image_size"])
    size = {key: value for key, value in dict(processor.size).items() if value is not None}
    if size != {"height": side, "width": side}:
        raise UserError(
            f"{where}: the tower takes squares of {side} pixels, the image processor of {encoder.path} makes "
            f"{size}; use the processor of the same checkpoint"
        )
    return side
