"""Videos whose text says when they are shown: Qwen3-VL's video processor.

Frames are taken at even distances from the first to the last, and pixels are bounded over all frames.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from data.frame_sampling import FrameSampling, shown_times
from data.grid_videos import GridVideoPreprocess, asked_sampling, stored_processor
from data.media import MediaHeader
from omni_ds.errors import UserError

# transformers' Qwen3VLVideoProcessor
_DEFAULTS = {
    "fps": 2.0,
    "min_frames": 4,
    "max_frames": 768,
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    "max_video_tokens": 768,
}


def spread(total: int, fps: float, sampling: FrameSampling) -> np.ndarray:
    """As Qwen3VLVideoProcessor.sample_frames."""
    count = max(int(total / fps * sampling.fps), sampling.min_frames)
    return np.linspace(0, total - 1, min(count, sampling.max_frames, total)).round().astype(np.int64)


@dataclass(frozen=True)
class ClipSizing:
    """Pixels of all frames of a video at least and at most; frame_pixels: of one at most, 0: no bound."""

    min_pixels: int
    max_pixels: int
    frame_pixels: int = 0

    def most(self, frames: int, _: int) -> int:
        """Pixels that so many frames may have, as Qwen3VLVideoProcessor's cap_pixels_per_frame."""
        if not self.frame_pixels:
            return self.max_pixels
        share = min(self.frame_pixels, self.max_pixels // frames)
        return frames * max(share, int(self.min_pixels * 1.05))


class TimedVideoPreprocess(GridVideoPreprocess):
    """See the module. sizing: a `ClipSizing`."""

    def _size(self, header: MediaHeader, frames: int) -> tuple[int, int]:
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

        most = self.sizing.most(frames, self.temporal)
        frames = max(frames, self.temporal)  # one frame alone is repeated
        return smart_resize(
            frames, header.height, header.width, self.temporal, self.side, self.sizing.min_pixels, most
        )

    def _times(self, header: MediaHeader, taken: np.ndarray) -> tuple[float, ...]:
        """Of each step: the middle of its first and its last frame's time."""
        times = shown_times(header, taken, self.sampling)
        firsts, lasts = times[:: self.temporal], times[self.temporal - 1 :: self.temporal]
        return tuple(((firsts + lasts) / 2).tolist())


def timed_video_preprocess(where: str, processor: Any, encoder: Any) -> TimedVideoPreprocess:
    """Of a checkpoint's video processor, within the configuration's bounds. processor: its image processor.

    ``video_max_pixels`` bounds a frame, ``video_total_pixels`` all of them (each pair of frames counts once).
    """
    given, stored = encoder.processor, _DEFAULTS | stored_processor(encoder.path)
    size = dict(_DEFAULTS["size"]) | dict(stored.get("size") or {})
    least, most = size["shortest_edge"], size["longest_edge"]
    if given.video_total_pixels:
        most = given.video_total_pixels * processor.temporal_patch_size
    frame = given.video_max_pixels or 0
    if not frame and stored.get("cap_pixels_per_frame"):
        frame = stored["max_video_tokens"] * (processor.patch_size * processor.merge_size) ** 2
    least = given.video_min_pixels or least
    if least > most:
        raise UserError(
            f"{where}.processor: the frames of a video have at least {least} and at most {most} pixels; set "
            "video_min_pixels and video_total_pixels"
        )
    processor, sampling = asked_sampling(where, processor, encoder, stored, _DEFAULTS)
    return TimedVideoPreprocess(processor, sampling, ClipSizing(least, most, frame), spread)
