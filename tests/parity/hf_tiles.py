"""Inputs as HF's processors of models with tiles make them, of parts that do not need torchvision."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from parity.hf_videos import FPS, MIN_FRAMES, read_video
from PIL import Image
from torch import Tensor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.video_utils import VideoMetadata

PROCESSORS = {"llava_onevision": LlavaOnevisionProcessor, "internvl": InternVLProcessor}
"""By the ``model_type`` of a checkpoint."""
MAX_FRAMES = 32


def tiled_inputs(samples: Any, text: str, row: dict[str, Any]) -> dict[str, Tensor]:
    """Keyword arguments of the model's forward. samples: ``HFSamples``; text: as the template renders it."""
    config, images = samples.config, samples.processor
    processor = _processor(config, samples.tokenizer, images)
    made: dict[str, Any] = {}
    if names := row.get("images"):
        pictures = [Image.open(samples.folder / name).convert("RGB") for name in names]
        made = dict(images([pictures], return_tensors="pt", **getattr(processor, "images_kwargs", {})))
    centred = config.model_type == "internvl"
    videos = [_video(value, samples, centred) for value in row.get("videos", ())]
    made["pixel_values_videos"] = videos
    order, counts = [], {"image": 0, "video": 0}

    def written(match: re.Match[str]) -> str:
        medium = "video" if match[0] == processor.video_token else "image"
        number, counts[medium] = counts[medium], counts[medium] + 1
        order.append((medium, number))
        return getattr(processor, f"replace_{medium}_token")(made, number)

    marks = f"{re.escape(processor.image_token)}|{re.escape(processor.video_token)}"
    text = re.sub(marks, written, text)
    ids = samples.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    if centred and order:  # frames and tiles in the order of the text, as InternVLProcessor joins them
        tiles = made["pixel_values"].split(made["num_patches"].tolist()) if "pixel_values" in made else ()
        pieces = {"image": tiles, "video": videos}
        return {"input_ids": ids, "pixel_values": torch.cat([pieces[m][number] for m, number in order])}
    del made["pixel_values_videos"]
    if videos and not centred:
        made["pixel_values_videos"] = torch.stack(videos)
    return {"input_ids": ids, **made}


def _video(value: Any, samples: Any, centred: bool) -> Tensor:
    """[frames, 3, side, side]: frames taken as HF's samplers do, each resized and normalised as an image."""
    if isinstance(value, str):
        frames, rate = read_video(samples.folder / value)
        total = len(frames)
        count = int(min(max(total / rate * FPS, MIN_FRAMES), total, MAX_FRAMES))
        frames = [frames[index] for index in _indices(total, rate, count, centred)]
    else:
        frames = [Image.open(samples.folder / name).convert("RGB") for name in value["frames"]]
    if centred:
        return samples.processor(frames, crop_to_patches=False, return_tensors="pt")["pixel_values"]
    whole = [samples.processor([[frame]], return_tensors="pt")["pixel_values"][0, 0] for frame in frames]
    return torch.stack(whole)


def _indices(total: int, rate: float, count: int, centred: bool) -> list[int]:
    """InternVLVideoProcessor.sample_frames, or what other video processors do."""
    from transformers.video_utils import default_sample_indices_fn

    if centred:
        return torch.arange(total / count / 2, total, total / count).int().tolist()
    metadata = VideoMetadata(total_num_frames=total, fps=rate)
    return np.asarray(default_sample_indices_fn(metadata, num_frames=count)).tolist()


def _processor(config: Any, tokenizer: Any, images: Any) -> Any:
    """The processor without its video half: enough to say what is written for a medium."""
    cls = PROCESSORS[config.model_type]
    made, vision = object.__new__(cls), config.vision_config
    made.image_processor, made.tokenizer, made.video_token = images, tokenizer, "<video>"
    if cls is InternVLProcessor:
        made.image_seq_length = config.image_seq_length
        made.image_token = tokenizer.context_image_token
        made.start_image_token, made.end_image_token = tokenizer.start_image_token, tokenizer.end_image_token
        return made
    made.num_image_tokens = (vision.image_size // vision.patch_size) ** 2
    made.vision_feature_select_strategy = config.vision_feature_select_strategy
    made.vision_aspect_ratio, made.image_token = config.vision_aspect_ratio, "<image>"
    return made
