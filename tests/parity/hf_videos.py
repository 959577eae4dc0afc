"""Videos as Qwen-VL's processors in transformers make them, of parts that do not need torchvision."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

FPS, MIN_FRAMES, MAX_FRAMES = 2.0, 4, 768


def hf_video(value: Any, folder: Path, processor: Any) -> tuple[Tensor, list[int], float]:
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
        count = min(max(total / rate * FPS, MIN_FRAMES), most, total)
        count = math.floor(count / temporal) * temporal
        indices = torch.arange(0, total, total / count).int().tolist()
        frames, rate = [frames[index] for index in indices], len(indices) / total * rate
    else:
        frames = [Image.open(folder / name).convert("RGB") for name in value["frames"]]
        rate = value["fps"]
    frames += frames[-1:] * (-len(frames) % temporal)
    steps = []
    for first in range(0, len(frames), temporal):
        made = processor(frames[first : first + temporal], return_tensors="pt")
        size = processor.temporal_patch_size, processor.patch_size, processor.patch_size
        single = made["pixel_values"].unflatten(1, (3, *size))[:, :, 0]  # each image stands there repeated
        steps.append(torch.stack(single.chunk(temporal), dim=2).flatten(1))
    _, rows, columns = made["image_grid_thw"][0].tolist()
    return torch.cat(steps), [len(steps), rows, columns], temporal / rate


def read_video(path: Path) -> tuple[list[Image.Image], float]:
    import av

    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        rate = float(container.streams.video[0].average_rate)
    return [Image.fromarray(np.ascontiguousarray(frame)) for frame in frames], rate
