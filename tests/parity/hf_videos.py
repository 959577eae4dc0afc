"""Videos as Qwen-VL's processors in transformers make them, of parts that do not need torchvision."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

FPS, MIN_FRAMES, MAX_FRAMES = 2.0, 4, 768


def hf_video(value: Any, folder: Path, processor: Any, fps: float = FPS) -> tuple[Tensor, list[int], float]:
    """(patches [tokens, values], grid (t, h, w), seconds of a step of it) of a file's name, or of the names
    of frames with their rate.

    Qwen2VLVideoProcessor.sample_frames on a file; its patches of frames that the image processor resized and
    normalised one by one; Qwen2_5_VLProcessor's second_per_grid_ts.
    """
    temporal = processor.temporal_patch_size
    if isinstance(value, str):
        frames, rate = read_video(folder / value)
        total = len(frames)
        most = math.floor(min(MAX_FRAMES, total) / temporal) * temporal
        count = min(max(total / rate * fps, MIN_FRAMES), most, total)
        count = math.floor(count / temporal) * temporal
        indices = torch.arange(0, total, total / count).int().tolist()
        frames, rate = [frames[index] for index in indices], len(indices) / total * rate
    else:
        frames = [Image.open(folder / name).convert("RGB") for name in value["frames"]]
        rate = value["fps"]
    patches, grid = _patches(frames, processor)
    return patches, grid, temporal / rate


def hf_timed_video(value: Any, folder: Path, processor: Any) -> tuple[Tensor, list[int], str]:
    """(patches, grid, text in the place of the placeholder) as Qwen3VLVideoProcessor samples and sizes the
    frames, and Qwen3VLProcessor writes the text."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

    temporal, merge = processor.temporal_patch_size, processor.merge_size
    if isinstance(value, str):
        frames, rate = read_video(folder / value)
        metadata = SimpleNamespace(total_num_frames=len(frames), fps=rate)
        limits = SimpleNamespace(fps=FPS, min_frames=MIN_FRAMES, max_frames=MAX_FRAMES)
        indices = Qwen3VLVideoProcessor.sample_frames(limits, metadata)
        frames = [frames[index] for index in indices]
    else:
        frames = [Image.open(folder / name).convert("RGB") for name in value["frames"]]
        rate, indices = value["fps"], np.arange(len(frames))
    width, height = frames[0].size
    size = dict(processor.size)
    height, width = smart_resize(
        max(len(frames), temporal),
        height,
        width,
        temporal,
        processor.patch_size * merge,
        size["shortest_edge"],
        size["longest_edge"],
    )
    frames = [frame.resize((width, height), Image.Resampling.BICUBIC) for frame in frames]
    patches, grid = _patches(frames, processor, do_resize=False)
    writer = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=merge, temporal_patch_size=temporal),
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token="<|video_pad|>",
        _calculate_timestamps=partial(Qwen3VLProcessor._calculate_timestamps, None),
    )
    made = {
        "video_grid_thw": torch.tensor([grid]),
        "video_metadata": [SimpleNamespace(fps=rate, frames_indices=indices)],
    }
    return patches, grid, Qwen3VLProcessor.replace_video_token(writer, made, 0)


def _patches(frames: list[Image.Image], processor: Any, **settings: Any) -> tuple[Tensor, list[int]]:
    temporal = processor.temporal_patch_size
    frames = frames + frames[-1:] * (-len(frames) % temporal)
    steps = []
    for first in range(0, len(frames), temporal):
        made = processor(frames[first : first + temporal], return_tensors="pt", **settings)
        size = processor.temporal_patch_size, processor.patch_size, processor.patch_size
        single = made["pixel_values"].unflatten(1, (3, *size))[:, :, 0]  # each image stands there repeated
        steps.append(torch.stack(single.chunk(temporal), dim=2).flatten(1))
    _, rows, columns = made["image_grid_thw"][0].tolist()
    return torch.cat(steps), [len(steps), rows, columns]


def read_video(path: Path) -> tuple[list[Image.Image], float]:
    import av

    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        rate = float(container.streams.video[0].average_rate)
    return [Image.fromarray(np.ascontiguousarray(frame)) for frame in frames], rate
