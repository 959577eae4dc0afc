"""Videos for towers that take frames of any size: Qwen2-VL's video processor, without torchvision.

Frames are chosen and sized with its arithmetic, and resized as the image processor (PIL back end) does an
image; the video processor resizes with torchvision, whose bicubic filter rounds differently.
"""

import copy
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.errors import MediaError
from data.frame_sampling import Formula, FrameSampling, evenly, sample_frames
from data.hub_files import side_file
from data.media import MediaHeader, MediaRef
from data.native import pixel_values
from data.planned import Planned, Preprocess
from data.video import Video
from omni_ds.errors import UserError

# transformers' Qwen2VLVideoProcessor; its fps is None, which takes every frame
DEFAULTS = {
    "fps": 2.0,
    "min_frames": 4,
    "max_frames": 768,
    "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    "max_video_tokens": 128000,
}


@dataclass(frozen=True)
class VideoSizing:
    """Pixels of a frame at least and at most; total: of all pairs of frames that become one row of the grid
    in time, at most; 0: no bound."""

    min_pixels: int
    max_pixels: int
    total_pixels: int = 0

    def most(self, frames: int, temporal: int) -> int:
        """Pixels that a frame of a video of so many may have, as Qwen2VLVideoProcessor's
        cap_pixels_per_frame."""
        if not self.total_pixels:
            return self.max_pixels
        share = self.total_pixels * temporal // frames
        return max(min(self.max_pixels, share), int(self.min_pixels * 1.05))


class GridVideoPreprocess(Preprocess):
    """Frames of a video, taken evenly, each resized as an image of whole cells; the last is repeated up to a
    multiple of the frames that one patch joins.

    processor: the image processor of the checkpoint; resample, mean and deviation are its own.
    """

    modality = "video"

    def __init__(
        self,
        processor: Any,
        sampling: FrameSampling,
        sizing: VideoSizing,
        formula: Formula = evenly,
    ):
        self.processor, self.sampling, self.sizing = processor, sampling, sizing
        self.formula = formula
        self.side = processor.patch_size * processor.merge_size
        self.temporal = processor.temporal_patch_size
        self.settings = sampling, sizing, formula.__name__
        self._resized = sys.modules[type(processor).__module__].smart_resize

    def plan_shape(self, header: MediaHeader) -> tuple[int, ...]:
        return self.plan(header).shape

    def plan(self, header: MediaHeader) -> Planned:
        return self._plan(header)[0]

    def _plan(self, header: MediaHeader) -> tuple[Planned, np.ndarray]:
        """And the numbers of the frames, padding included."""
        taken, rate = sample_frames(header, self.sampling, self.formula)
        try:
            height, width = self._size(header, len(taken))
        except ValueError as error:
            raise MediaError(
                "video cannot be resized", f"{header.height} x {header.width}: {error}"
            ) from None
        taken = np.append(taken, np.repeat(taken[-1:], -len(taken) % self.temporal))
        planned = Planned((len(taken), height, width), self.temporal / rate, self._times(header, taken))
        return planned, taken

    def _size(self, header: MediaHeader, frames: int) -> tuple[int, int]:
        """(height, width) of a frame of so many; ValueError for extreme proportions."""
        most = self.sizing.most(frames, self.temporal)
        return self._resized(header.height, header.width, self.side, self.sizing.min_pixels, most)

    def _times(self, header: MediaHeader, taken: np.ndarray) -> tuple[float, ...]:
        """What the text says of each step (`Planned.times`)."""
        return ()

    def load(self, ref: MediaRef, shape: tuple[int, ...]) -> np.ndarray:
        return self.load_frames(ref, shape, range(shape[0]))

    def load_frames(self, ref: MediaRef, shape: tuple[int, ...], numbers: Sequence[int]) -> np.ndarray:
        video = Video(ref)
        planned, taken = self._plan(video.header)
        if planned.shape != tuple(shape):
            raise MediaError("video has changed since it was indexed", str(ref))
        taken = taken[list(numbers)]
        result = self.blank((len(taken), *shape[1:]))
        previous = None
        for place, (number, frame) in enumerate(zip(taken, video.frames(taken), strict=True)):
            if number == previous:
                result[:, place] = result[:, place - 1]
            else:
                result[:, place] = pixel_values(frame, shape[1:], self.processor)
            previous = number
        return result

    def blank(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros((3, *shape), dtype=np.float32)


def grid_video_preprocess(where: str, processor: Any, encoder: Any) -> GridVideoPreprocess:
    """Of a checkpoint's video processor, in the files where transformers looks for it, within the
    configuration's bounds. processor: its image processor."""
    return bounded_videos(where, processor, encoder, DEFAULTS | stored_processor(encoder.path))


def bounded_videos(
    where: str,
    processor: Any,
    encoder: Any,
    stored: Mapping[str, Any],
    kind: type[GridVideoPreprocess] = GridVideoPreprocess,
) -> GridVideoPreprocess:
    """As a checkpoint's video processor says (stored, all of `DEFAULTS`), within the configuration's
    bounds."""
    given = encoder.processor
    size = dict(DEFAULTS["size"]) | dict(stored.get("size") or {})
    for edge, key in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        values = (getattr(given, f"video_{key}"), getattr(given, key), stored.get(key))
        size[edge] = next((value for value in values if value is not None), size[edge])
    if size["shortest_edge"] > size["longest_edge"]:
        raise UserError(
            f"{where}.processor: a frame has at least {size['shortest_edge']} and at most "
            f"{size['longest_edge']} pixels; set video_min_pixels and video_max_pixels"
        )
    total = given.video_total_pixels or 0
    if not total and stored.get("cap_pixels_per_frame"):
        side = processor.patch_size * processor.merge_size
        total = int(stored["max_video_tokens"] * side * side * 0.9)
    processor, sampling = asked_sampling(where, processor, encoder, stored, DEFAULTS)
    return kind(processor, sampling, VideoSizing(size["shortest_edge"], size["longest_edge"], total))


def asked_sampling(
    where: str, processor: Any, encoder: Any, stored: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[Any, FrameSampling]:
    """(the image processor with what is stored about videos, how frames are taken): of the configuration,
    else stored, else the defaults."""
    numbers = {
        key: getattr(encoder.processor, key) or stored[key] or defaults[key]
        for key in ("fps", "min_frames", "max_frames")
    }
    if numbers["min_frames"] > numbers["max_frames"]:
        raise UserError(
            f"{where}.processor: a video has at least {numbers['min_frames']} and at most "
            f"{numbers['max_frames']} frames; set min_frames and max_frames"
        )
    processor = copy.copy(processor)
    for key in ("image_mean", "image_std", "rescale_factor", "resample"):
        setattr(processor, key, stored.get(key, getattr(processor, key)))
    return processor, FrameSampling(
        float(numbers["fps"]), numbers["min_frames"], numbers["max_frames"], processor.temporal_patch_size
    )


def stored_processor(path: str) -> dict[str, Any]:
    """What a checkpoint says about videos: the first that it has of the places where transformers looks."""
    for name, key in (
        ("processor_config.json", "video_processor"),
        ("video_preprocessor_config.json", None),
        ("preprocessor_config.json", None),
    ):
        file = side_file(path, name)
        if file is None:
            continue
        content = json.loads(file.read_text())
        content = content.get(key) if key else content
        if content:
            return {name: value for name, value in content.items() if value is not None}
    return {}
