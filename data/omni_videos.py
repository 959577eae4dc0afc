"""Videos of Qwen2.5-Omni and Qwen3-Omni, whose processors decide what Qwen2-VL's video processor would."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from data.grid_videos import DEFAULTS, GridVideoPreprocess, bounded_videos, stored_processor
from data.media import MediaHeader
from data.planned import Planned


class NominalVideoPreprocess(GridVideoPreprocess):
    """A step of a file lasts as long as at the rate that is asked for, whatever rate its frames could be
    taken at; that of a list of frames as long as the list says."""

    def plan(self, header: MediaHeader) -> Planned:
        planned = super().plan(header)
        return planned if header.listed else replace(planned, seconds=self.temporal / self.sampling.fps)


def omni_video_preprocess(fps: float) -> Callable[[str, Any, Any], NominalVideoPreprocess]:
    """As Qwen2_5OmniProcessor and Qwen3OmniMoeProcessor: fps is taken where neither configuration nor
    checkpoint has one, and frames are bounded whatever the checkpoint says."""

    def preprocess(where: str, processor: Any, encoder: Any) -> NominalVideoPreprocess:
        side = processor.patch_size * processor.merge_size
        size = {"shortest_edge": 128 * side**2, "longest_edge": 768 * side**2}
        stored = DEFAULTS | {"fps": fps} | stored_processor(encoder.path)
        stored |= {"size": size, "min_pixels": None, "max_pixels": None}
        return bounded_videos(where, processor, encoder, stored, NominalVideoPreprocess)

    return preprocess
