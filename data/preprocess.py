"""Raw media -> arrays of exactly the planned shape, with the arithmetic of HF's processors.

A shape is planned from the header alone, so that token counts are known before anything is decoded; what is
decoded later is cut or padded to it.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import MediaError
from data.grid_images import grid_preprocess
from data.grid_videos import grid_video_preprocess
from data.media import MediaHeader, MediaRef, decode_audio, decode_image
from data.native import NativeImagePreprocess
from data.omni_videos import omni_video_preprocess
from data.padded_audio import PaddedAudioPreprocess
from data.planned import Preprocess, SeveralMedia
from data.tiles import internvl_preprocess, onevision_preprocess
from data.timed_videos import timed_video_preprocess
from omni_ds.config.limits import VIDEO_OPTIONS
from omni_ds.errors import UserError
from omni_ds.plan.encoder_geometry import read_geometry, tower_config, tower_type
from omni_ds.plan.image_size import NAFLEX, Sizing, image_sizing
from omni_ds.plan.towers.onevision import TOWER_TYPE as ONEVISION
from omni_ds.plan.towers.qwen_audio import REACH

# Audio towers whose clips HF pads and masks -> frames behind the sound that they see.
_PADDED = {"qwen2_audio_encoder": REACH, "qwen2_5_omni_audio_encoder": 0}
_TILED = {"internvl_vision": internvl_preprocess, ONEVISION: onevision_preprocess}


class ImagePreprocess(Preprocess):
    """An HF image processor (PIL back end) that resizes, crops and normalises one image to one array."""

    modality = "image"

    def __init__(self, processor: Any, where: str = "image processor"):
        self.processor = processor
        if getattr(processor, "do_pan_and_scan", None):
            raise UserError(
                f"{where}: do_pan_and_scan cuts an image into several, which is not supported; set it to "
                "false in the checkpoint's preprocessor_config.json or processor_config.json"
            )
        self._size = _sides(processor, "size") if processor.do_resize else {}
        crops = bool(getattr(processor, "do_center_crop", None))
        self._crop = _sides(processor, "crop_size") if crops else {}
        if not self._crop and not {"height", "width"} <= set(self._size):
            raise UserError(
                f"{where}: the processor's size is {self._size or 'not set'} and it does not crop, but "
                "without processor.min_pixels and max_pixels a tower takes images of one size; set one of "
                "the keys, or use a processor that resizes to height and width"
            )

    def plan_shape(self, header: MediaHeader) -> tuple[int, int]:
        if self._crop:
            return self._crop["height"], self._crop["width"]
        return self._size["height"], self._size["width"]

    def load(self, ref: MediaRef, shape: tuple[int, ...]) -> np.ndarray:
        image = decode_image(ref)
        try:
            pixels = self.processor(image, return_tensors="np")["pixel_values"][0]
        except ValueError as error:  # an image of extreme proportions can shrink to nothing
            raise MediaError("image cannot be resized", f"{ref} {image.size}: {error}") from None
        return _fit(np.asarray(pixels, dtype=np.float32), (pixels.shape[0], *shape))

    def blank(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros((3, *shape), dtype=np.float32)


class AudioPreprocess(Preprocess):
    """Whisper's log-mel spectrogram of a clip's own duration.

    max_seconds: longer clips are refused. pad_to_window: silence is added up to a whole number of the
    extractor's chunks (30 s), as HF does.
    """

    modality = "audio"

    def __init__(self, processor: Any, max_seconds: float, pad_to_window: bool = False):
        self.processor = processor
        self.max_seconds = max_seconds
        self.pad_to_window = pad_to_window
        self.settings = max_seconds, pad_to_window

    def plan_shape(self, header: MediaHeader) -> tuple[int]:
        seconds = header.samples / header.sampling_rate
        if seconds > self.max_seconds:
            raise MediaError(
                "audio longer than max_seconds",
                f"{seconds:.1f} s; processor.max_seconds is {self.max_seconds:g}",
            )
        return (self._samples(header) // self.processor.hop_length,)

    def _samples(self, header: MediaHeader) -> int:
        """Samples after resampling and padding; at least one frame and what the STFT's reflection needs."""
        rate = self.processor.sampling_rate
        samples = -(-header.samples * rate // header.sampling_rate)
        if self.pad_to_window:
            return int(math.ceil(samples / self.processor.n_samples) * self.processor.n_samples)
        return max(samples, self.processor.n_fft // 2 + 1, self.processor.hop_length)

    def load(self, ref: MediaRef, shape: tuple[int, ...]) -> np.ndarray:
        samples = decode_audio(ref, self.processor.sampling_rate)
        (frames,) = shape
        # At least the planned frames, and never an STFT of less than its reflection needs.
        wanted = max(frames * self.processor.hop_length, self.processor.n_fft // 2 + 1)
        surplus = self.processor.hop_length - 1
        samples = np.pad(samples[: wanted + surplus], (0, max(0, wanted - len(samples))))
        features = self.processor(
            samples,
            sampling_rate=self.processor.sampling_rate,
            padding="do_not_pad",
            truncation=False,
            return_tensors="np",
        )["input_features"][0]
        return _fit(np.asarray(features, dtype=np.float32), (features.shape[0], frames))

    def blank(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros((self.processor.feature_size, *shape), dtype=np.float32)


_VIDEOS = {  # by model_type of the tower; others: grid_video_preprocess
    "qwen3_vl_vision": timed_video_preprocess,
    "qwen3_vl_moe_vision": timed_video_preprocess,
    "qwen2_5_omni_vision_encoder": omni_video_preprocess(fps=2.0),
    "qwen3_omni_moe_vision_encoder": omni_video_preprocess(fps=1.0),
}


def build_preprocess(name: str, encoder: Any, hf_config: Mapping[str, Any]) -> Preprocess:
    """Preprocessing of one encoder.

    encoder: its section of the configuration. hf_config: of the tower, as a dict. The processor is the
    checkpoint's; one without its own, or an inline config, gets a default: images resized to image_size
    (NaFlex: to num_patches) with mean and deviation 0.5, audio Whisper's with num_mel_bins.
    """
    where = f"omni.encoders.{name}"
    if encoder.modality == "image":
        if make := _TILED.get(tower_type(hf_config)):
            return make(where, _load_image_processor(where, encoder), encoder, hf_config)
        if hf_config.get("spatial_merge_size"):
            processor = _load_image_processor(where, encoder)
            images = grid_preprocess(where, processor, encoder, hf_config)
            videos = _VIDEOS.get(hf_config.get("model_type"), grid_video_preprocess)
            return SeveralMedia({"image": images, "video": videos(where, processor, encoder)})
        _refuse_video_keys(where, encoder)
        processor = _load_image_processor(where, encoder) or _default_image_processor(hf_config)
        sizing = _sizing(where, encoder, hf_config, processor)
        if sizing:
            return NativeImagePreprocess(processor, sizing)
        images = ImagePreprocess(processor, where)
        if encoder.projector.type != "mlp":
            _check_size(where, images, hf_config["image_size"])
        return images
    if encoder.modality == "audio":
        processor = _load_audio_processor(where, encoder) or _default_audio_processor(hf_config, encoder)
        _check_audio(where, processor, encoder, hf_config)
        if (model_type := hf_config.get("model_type")) in _PADDED:
            return PaddedAudioPreprocess(processor, encoder.processor.max_seconds, _PADDED[model_type])
        return AudioPreprocess(processor, encoder.processor.max_seconds, encoder.processor.pad_to_window)
    raise UserError(f"{where}.modality is {encoder.modality!r}: only image and audio are supported yet")


def _check_size(where: str, images: ImagePreprocess, side: int) -> None:
    """A tower whose HF class takes one size alone."""
    made = images.plan_shape(MediaHeader("image", height=side, width=side))
    if made != (side, side):
        raise UserError(
            f"{where}: the image processor makes images of {made[0]} x {made[1]} pixels, the tower takes "
            f"{side} x {side}; use the processor of the same checkpoint"
        )


def _refuse_video_keys(where: str, encoder: Any) -> None:
    for key in VIDEO_OPTIONS:
        if getattr(encoder.processor, key) is not None:
            raise UserError(f"{where}.processor.{key}: this encoder takes no video; remove it")


def _sizing(where: str, encoder: Any, hf_config: Mapping[str, Any], processor: Any) -> Sizing | None:
    """How images are sized natively; None: to the processor's size."""
    model_type, _ = tower_config(hf_config)
    bounds = encoder.processor.min_pixels, encoder.processor.max_pixels
    if model_type != NAFLEX and bounds == (None, None):
        return None
    return image_sizing(where, encoder, read_geometry(where, encoder, hf_config), processor)


def _load_image_processor(where: str, encoder: Any) -> Any:
    if encoder.path is None or not _has_processor(encoder.path):
        return None
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(
            encoder.path, backend="pil", trust_remote_code=encoder.trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"{where}.path: the image processor of {encoder.path} cannot be loaded: {error}"
        ) from None


def _load_audio_processor(where: str, encoder: Any) -> Any:
    if encoder.path is None or not _has_processor(encoder.path):
        return None
    from transformers import WhisperFeatureExtractor

    try:
        return WhisperFeatureExtractor.from_pretrained(encoder.path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{where}.path: the feature extractor of {encoder.path} cannot be loaded: {error}"
        ) from None


def _has_processor(path: str) -> bool:
    """Whether a checkpoint folder brings a processor; a hub name is asked by loading."""
    folder = Path(path)
    return not folder.is_dir() or any(
        (folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")
    )


def _default_image_processor(hf_config: Mapping[str, Any]) -> Any:
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    model_type, tower = tower_config(hf_config)
    if model_type == NAFLEX:
        sizes = {"patch_size": tower.get("patch_size", 16), "max_num_patches": tower.get("num_patches", 256)}
        return Siglip2ImageProcessorPil(**sizes)
    size = hf_config.get("vision_config", hf_config).get("image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    return SiglipImageProcessorPil(
        size={"height": height, "width": width}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )


def _default_audio_processor(hf_config: Mapping[str, Any], encoder: Any) -> Any:
    from transformers import WhisperFeatureExtractor

    rate = encoder.processor.sampling_rate or 16000
    hop = rate // 100
    seconds = 2 * hf_config.get("max_source_positions", 1500) / 100
    return WhisperFeatureExtractor(
        feature_size=hf_config.get("num_mel_bins", 80),
        sampling_rate=rate,
        hop_length=hop,
        n_fft=rate // 40,
        chunk_length=int(seconds) if seconds == int(seconds) else seconds,
    )


def _check_audio(where: str, processor: Any, encoder: Any, hf_config: Mapping[str, Any]) -> None:
    mels = hf_config.get("num_mel_bins", processor.feature_size)
    if processor.feature_size != mels:
        raise UserError(
            f"{where}: the encoder takes {mels} mel bins, its feature extractor makes "
            f"{processor.feature_size}; use the extractor of the same checkpoint"
        )
    rate = encoder.processor.sampling_rate
    if rate is not None and rate != processor.sampling_rate:
        raise UserError(
            f"{where}.processor.sampling_rate is {rate}, but the checkpoint's is {processor.sampling_rate}; "
            "remove the key, clips are resampled"
        )
    positions = hf_config.get("max_source_positions")
    if encoder.processor.pad_to_window and positions and processor.nb_max_frames != 2 * positions:
        raise UserError(
            f"{where}.processor.pad_to_window: a window of the encoder has {2 * positions} mel frames, of "
            f"the feature extractor {processor.nb_max_frames}; use the extractor of the same checkpoint"
        )


def _sides(processor: Any, key: str) -> dict[str, int]:
    size = getattr(processor, key, None)
    if isinstance(size, int):
        return {"height": size, "width": size}
    return {k: v for k, v in dict(size or {}).items() if v is not None}


def _fit(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Cut, or pad with zeros, at the far end of every axis."""
    array = array[tuple(slice(0, side) for side in shape)]
    missing = [(0, side - have) for side, have in zip(shape, array.shape, strict=True)]
    return np.pad(array, missing) if any(after for _, after in missing) else np.ascontiguousarray(array)
