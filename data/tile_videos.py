"""Videos for towers that take squares of one size: frames taken evenly, each one tile."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from data.errors import MediaError
from data.frame_sampling import Formula, FrameSampling, evenly, sample_frames
from data.grid_videos import stored_processor
from data.media import MediaHeader, MediaRef
from data.native import pixel_values
from data.planned import Planned, Preprocess
from data.video import Video
from omni_ds.errors import UserError

_FPS, _MIN_FRAMES, _MAX_FRAMES = 2.0, 4, 32  # HF's processors say nothing and take every frame
_SIZES = ("video_min_pixels", "video_max_pixels", "video_total_pixels")


def centred(total: int, fps: float, sampling: FrameSampling) -> np.ndarray:
    """A `Formula`: as many frames as `evenly` takes, each from the middle of its part of the video, as
    InternVLVideoProcessor.sample_frames does."""
    import torch  # its arange, for its rounding

    share = total / len(evenly(total, fps, sampling))
    return torch.arange(share / 2, total, share).int().numpy().astype(np.int64)


class TiledVideoPreprocess(Preprocess):
    """A video as float32 [3, frames, side, side]; shape (frames, side, side).

    Frames are resized as the image processor (PIL back end) does an image; transformers' video processors
    need torchvision, whose bicubic filter rounds differently.
    """

    modality = "video"

    def __init__(self, processor: Any, side: int, sampling: FrameSampling, formula: Formula = evenly):
        self.processor, self.side, self.sampling, self.formula = processor, side, sampling, formula
        self.settings = sampling, formula.__name__

    def plan_shape(self, header: MediaHeader) -> tuple[int, ...]:
        return self.plan(header).shape

    def plan(self, header: MediaHeader) -> Planned:
        taken, rate = sample_frames(header, self.sampling, self.formula)
        return Planned((len(taken), self.side, self.side), 1 / rate)

    def load(self, ref: MediaRef, shape: tuple[int, ...]) -> np.ndarray:
        return self.load_frames(ref, shape, range(shape[0]))

    def load_frames(self, ref: MediaRef, shape: tuple[int, ...], numbers: Sequence[int]) -> np.ndarray:
        video = Video(ref)
        taken, _ = sample_frames(video.header, self.sampling, self.formula)
        if (len(taken), self.side, self.side) != tuple(shape):
            raise MediaError("video has changed since it was indexed", str(ref))
        frames = video.frames(taken[list(numbers)])
        return np.stack([pixel_values(frame, shape[1:], self.processor) for frame in frames], axis=1)

    def blank(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros((3, *shape), dtype=np.float32)


def tiled_video_preprocess(
    where: str, processor: Any, side: int, encoder: Any, formula: Formula = evenly
) -> TiledVideoPreprocess:
    """Of a checkpoint whose images are made by ``processor``; its video processor's settings come first."""
    given, stored = encoder.processor, stored_processor(encoder.path)
    for key in _SIZES:
        if getattr(given, key) is not None:
            raise UserError(f"{where}.processor.{key}: all frames have {side} x {side} pixels; remove it")
    count = stored.get("num_frames")
    numbers = {
        "fps": given.fps or stored.get("fps") or _FPS,
        "min_frames": given.min_frames or count or _MIN_FRAMES,
        "max_frames": given.max_frames or count or _MAX_FRAMES,
    }
    if numbers["min_frames"] > numbers["max_frames"]:
        raise UserError(
            f"{where}.processor: a video has at least {numbers['min_frames']} and at most "
            f"{numbers['max_frames']} frames; set min_frames and max_frames"
        )
    processor = copy.copy(processor)
    for key in ("image_mean", "image_std", "rescale_factor", "resample"):
        setattr(processor, key, stored.get(key, getattr(processor, key)))
    return TiledVideoPreprocess(processor, side, FrameSampling(**numbers, multiple=1), formula)
