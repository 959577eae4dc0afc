"""Rows as the processors of Qwen2.5-Omni and Qwen3-Omni make them, of parts that do not need torchvision."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from parity.hf_videos import hf_video
from parity.model_reference import HFSamples
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class OmniSamples(HFSamples):
    """Sound of videos is heard, as with ``load_audio_from_video``; a row has at most one video."""

    def __init__(self, model: Path, rows: Path):
        super().__init__(model, rows)
        self.qwen3 = self.config.model_type.startswith("qwen3")
        self.fps = 1.5 if self.qwen3 else 2.0  # those of the tiny models' configurations

    def expand(self, text: str, row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        heard = self._heard(row)
        image, video, audio = (self.tokens[modality] for modality in ("image", "video", "audio"))
        media: dict[str, Any] = {}
        sounds = []
        if heard:
            media |= self._audio([value for value, _ in heard])
            counts = self._rows(media["feature_attention_mask"].sum(-1))
            clips = iter([n for n, (_, of_video) in zip(counts, heard, strict=True) if not of_video])
            sounds = [number for number, (_, of_video) in enumerate(heard) if of_video]
            text = re.sub(re.escape(audio), lambda _: audio * next(clips), text)
        if row.get("images"):
            media |= self._image(row["images"])
            places = iter(self._counts("image", media))
            text = re.sub(re.escape(image), lambda _: image * next(places), text)
        if row.get("videos"):
            media |= self._video(row["videos"])
            if sounds:
                word = self._interleaved(media, counts, sounds[0])
                media["use_audio_in_video"] = True
            else:
                (count,) = self._counts("video", media)
                word = video * count
            text = text.replace(video, word)
        return text, media

    def more(self, ids: Tensor, media: dict[str, Tensor]) -> dict[str, Any]:
        return {"attention_mask": torch.ones_like(ids)}

    def _heard(self, row: dict[str, Any]) -> list[tuple[np.ndarray, bool]]:
        """(samples, is it of a video?) of clips and of sounds of videos in the order of their tags."""
        import soundfile

        clips, videos, found = iter(row.get("audios", ())), iter(row.get("videos", ())), []
        for tag in re.findall("<audio>|<video>", "".join(message["content"] for message in row["messages"])):
            if tag == "<audio>":
                found.append((soundfile.read(self.folder / next(clips), dtype="float32")[0], False))
            elif isinstance(name := next(videos), str) and (sound := _sound(self.folder / name)) is not None:
                found.append((sound, True))
        return found

    def _audio(self, sounds: list[np.ndarray]) -> dict[str, Tensor]:
        """One by one: the features of a clip that is padded to another's length differ at its end."""
        features, masks = [], []
        padding: dict[str, Any] = {"padding": "max_length"}
        if self.qwen3:  # as Qwen3OmniMoeProcessor
            padding = {"padding": True, "truncation": False}
        for sound in sounds:
            made = self.processors["audio"](
                sound, sampling_rate=16000, return_attention_mask=True, return_tensors="pt", **padding
            )
            features.append(made["input_features"][0].T)
            masks.append(made["attention_mask"][0])
        return {
            "input_features": pad_sequence(features, batch_first=True).transpose(1, 2),
            "feature_attention_mask": pad_sequence(masks, batch_first=True),
        }

    def _video(self, given: list[Any]) -> dict[str, Tensor]:
        """Of a file, HF takes the seconds of a step from the rate that was asked for."""
        ((patches, grid, seconds),) = [
            hf_video(value, self.folder, self.processors["image"], self.fps) for value in given
        ]
        if isinstance(given[0], str):
            seconds = self.processors["image"].temporal_patch_size / self.fps
        self.seconds = seconds
        return {
            "pixel_values_videos": patches,
            "video_grid_thw": torch.tensor([grid]),
            "video_second_per_grid": torch.tensor([seconds]),
        }

    def _interleaved(self, media: dict[str, Any], counts: list[int], sound: int) -> str:
        """``replace_video_with_audio_token`` of HF's processor, which cannot be made without torchvision."""
        from transformers import Qwen2_5OmniProcessor, Qwen3OmniMoeProcessor

        cls = Qwen3OmniMoeProcessor if self.qwen3 else Qwen2_5OmniProcessor
        start, end = (
            self.tokenizer.convert_ids_to_tokens(token)
            for token in (self.config.audio_start_token_id, self.config.audio_end_token_id)
        )
        processor = SimpleNamespace(
            video_processor=self.processors["image"],
            video_token=self.tokens["video"],
            audio_token=self.tokens["audio"],
            audio_bos_token=start,
            audio_eos_token=end,
        )
        processor.get_chunked_index = lambda *given: cls.get_chunked_index(processor, *given)
        video = {
            "video_grid_thw": media["video_grid_thw"].numpy(),
            "video_second_per_grid": [self.seconds],
        }
        return cls.replace_video_with_audio_token(
            processor,
            video,
            0,
            {"num_audio_tokens": counts},
            sound,
            position_id_per_seconds=self.config.position_id_per_seconds,
            seconds_per_chunk=2.0,
        )

    def _rows(self, lengths: Tensor) -> list[int]:
        from transformers.models.qwen2_5_omni import processing_qwen2_5_omni
        from transformers.models.qwen3_omni_moe import processing_qwen3_omni_moe

        module = processing_qwen3_omni_moe if self.qwen3 else processing_qwen2_5_omni
        return module._get_feat_extract_output_lengths(lengths).tolist()


def _sound(path: Path) -> np.ndarray | None:
    """float32 samples of the one channel of a video's sound."""
    import av

    with av.open(str(path)) as container:
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        pieces = [frame.to_ndarray()[0] for frame in container.decode(stream)]
        declared = round(stream.duration * stream.time_base * stream.rate)
    return np.concatenate(pieces).astype(np.float32)[:declared]  # the last packet is filled up
