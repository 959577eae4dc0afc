"""Processor of a composed model: chat text, images and clips -> model inputs, as in training."""

import importlib
import json
import os

import numpy as np
import torch
from transformers import AutoTokenizer, BatchFeature, ProcessorMixin, WhisperFeatureExtractor
from transformers.dynamic_module_utils import custom_object_save

from .media_omni import native_pixels, read_audio, read_image, whisper_samples

CALL_KEYS = ("padding", "padding_side", "return_tensors", "add_special_tokens", "truncation", "max_length")


class OmniProcessor(ProcessorMixin):
    """
    Args:
        image_processor, feature_extractor: of the image and the audio encoder; None without one.
        encoders: by modality, a dict with
            - `token`: the placeholder token; in a text it stands once for each medium;
            - image: `patch_size`, `reduction`, `factor`, `prefix` (class and register tokens that become
                features), `sizing` (of images at their own proportions, see `native_pixels`; None: the image
                processor resizes all to one size);
            - audio: `window` (mel frames of a full encoder window), `factor`, `pad_to_window`.
    """

    def __init__(
        self, image_processor=None, feature_extractor=None, tokenizer=None, encoders=None, chat_template=None
    ):
        self.image_processor = image_processor
        self.feature_extractor = feature_extractor
        self.tokenizer = tokenizer
        self.encoders = encoders or {}
        self.chat_template = chat_template
        for modality, encoder in self.encoders.items():
            setattr(self, f"{modality}_token", encoder["token"])
            setattr(self, f"{modality}_token_id", tokenizer.convert_tokens_to_ids(encoder["token"]))

    def image_rows(self, height, width):
        """Feature rows of an image of this size in pixels, after the image processor."""
        encoder = self.encoders["image"]
        tokens = (height // encoder["patch_size"]) * (width // encoder["patch_size"])
        if encoder["reduction"] == "pixel_shuffle":
            return tokens // encoder["factor"] ** 2
        return -(-(tokens + encoder["prefix"]) // encoder["factor"])

    def audio_rows(self, frames):
        """Feature rows of a clip of this many mel frames; the tower halves each window, rounding up."""
        encoder = self.encoders["audio"]
        full, rest = divmod(frames, encoder["window"])
        if rest and encoder["pad_to_window"]:
            full, rest = full + 1, 0
        return -(-(full * (encoder["window"] // 2) + (rest + 1) // 2) // encoder["factor"])

    def image_inputs(self, images):
        """Images (PIL, array, path) -> model inputs, and feature rows of each."""
        sizing = self.encoders["image"].get("sizing")
        if sizing is not None:
            pixels = [native_pixels(read_image(image), sizing, self.image_processor) for image in images]
        else:
            pixels = [
                self.image_processor(read_image(image), return_tensors="np")["pixel_values"][0]
                for image in images
            ]
        sizes = [array.shape[1:] for array in pixels]
        values = np.zeros((len(pixels), 3, *(max(side) for side in zip(*sizes, strict=True))), np.float32)
        for padded, array in zip(values, pixels, strict=True):
            padded[:, : array.shape[1], : array.shape[2]] = array
        inputs = {"pixel_values": torch.from_numpy(values)}
        if sizing is not None:
            inputs["image_sizes"] = torch.tensor(sizes)
        return inputs, [self.image_rows(*size) for size in sizes]

    def audio_inputs(self, clips, sampling_rate=None):
        """Clips (mono arrays at `sampling_rate` Hz, paths) -> model inputs, and feature rows of each."""
        extractor = self.feature_extractor
        mels = []
        for clip in clips:
            samples = read_audio(clip, sampling_rate, extractor.sampling_rate)
            samples, frames = whisper_samples(samples, extractor, self.encoders["audio"]["pad_to_window"])
            features = extractor(
                samples,
                sampling_rate=extractor.sampling_rate,
                padding="do_not_pad",
                truncation=False,
                return_tensors="np",
            )["input_features"][0]
            mels.append(torch.from_numpy(np.asarray(features, dtype=np.float32))[:, :frames])
        lengths = [mel.shape[1] for mel in mels]
        padded = torch.stack([torch.nn.functional.pad(mel, (0, max(lengths) - mel.shape[1])) for mel in mels])
        inputs = {"input_features": padded, "feature_lengths": torch.tensor(lengths)}
        return inputs, [self.audio_rows(length) for length in lengths]

    def __call__(self, images=None, text=None, audio=None, sampling_rate=None, videos=None, **kwargs):
        """Model inputs for one text or a list of texts.

        Args:
            text: rendered chat text, with one placeholder token per medium (`apply_chat_template` makes it).
            images, audio: media in the order of their placeholders over all texts; nested lists are joined.
            sampling_rate: of audio arrays, in Hz; None: the feature extractor's.
            padding: True by default, on the left, as generation needs. return_tensors: "pt" by default.
        """
        if videos:
            raise ValueError("this model takes no videos")
        for nested in ("text_kwargs", "images_kwargs", "audio_kwargs", "common_kwargs"):
            kwargs |= kwargs.pop(nested, None) or {}
        settings = {
            "padding": True,
            "padding_side": "left",
            "return_tensors": "pt",
            "add_special_tokens": False,
        }
        settings |= {key: kwargs[key] for key in CALL_KEYS if kwargs.get(key) is not None}
        sampling_rate = sampling_rate or kwargs.get("sampling_rate")
        data, rows = {}, {}
        for modality, media in (("image", _flat(images)), ("audio", _flat(audio))):
            if media and modality not in self.encoders:
                raise ValueError(f"this model has no {modality} encoder")
            if media:
                made = (
                    self.image_inputs(media)
                    if modality == "image"
                    else self.audio_inputs(media, sampling_rate)
                )
                data |= made[0]
                rows[modality] = made[1]
        if text is None:
            return BatchFeature(data)
        texts = [text] if isinstance(text, str) else list(text)
        ids = self.tokenizer(texts, add_special_tokens=settings["add_special_tokens"])["input_ids"]
        ids = self.expand(ids, rows)
        if settings.get("truncation"):
            raise ValueError("truncation would cut media; shorten the text instead")
        padded = self.tokenizer.pad(
            {"input_ids": ids},
            padding=settings["padding"],
            max_length=settings.get("max_length"),
            padding_side=settings["padding_side"],
            return_tensors=settings["return_tensors"],
        )
        return BatchFeature({**padded, **data})

    def expand(self, ids, rows):
        """Lists of token ids with every placeholder repeated once for each feature row of its medium."""
        queues = {
            getattr(self, f"{modality}_token_id"): (modality, list(rows.get(modality, [])))
            for modality in self.encoders
        }
        found = dict.fromkeys(self.encoders, 0)
        result = []
        for sequence in ids:
            expanded = []
            for token in sequence:
                if token not in queues:
                    expanded.append(token)
                    continue
                modality, counts = queues[token]
                if found[modality] < len(counts):
                    expanded += [token] * counts[found[modality]]
                found[modality] += 1
            result.append(expanded)
        for modality, count in found.items():
            if count != len(rows.get(modality, [])):
                raise ValueError(
                    f"{count} {self.encoders[modality]['token']} in the text, {len(rows.get(modality, []))} "
                    f"{modality} media given"
                )
        return result

    @property
    def model_input_names(self):
        media = ["pixel_values", "image_sizes", "input_features", "feature_lengths"]
        return ["input_ids", "attention_mask", *media]

    def to_dict(self):
        image, audio = self.image_processor, self.feature_extractor
        values = {"processor_class": type(self).__name__, "encoders": self.encoders}
        if image is not None:
            values["image_processor"] = json.loads(image.to_json_string())
            values["image_processor_class"] = f"{type(image).__module__}.{type(image).__name__}"
        if audio is not None:
            values["feature_extractor"] = json.loads(audio.to_json_string())
        return values | ({"auto_map": self.auto_map} if getattr(self, "auto_map", None) else {})

    def save_pretrained(self, save_directory, **kwargs):
        """Writes tokenizer, chat template and processor_config.json."""
        os.makedirs(save_directory, exist_ok=True)
        if self._auto_class is not None:
            custom_object_save(self, save_directory, config=self)
        self.tokenizer.save_pretrained(save_directory)
        if self.chat_template:
            with open(os.path.join(save_directory, "chat_template.jinja"), "w", encoding="utf-8") as file:
                file.write(self.chat_template)
        path = os.path.join(save_directory, "processor_config.json")
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(self.to_dict(), indent=2) + "\n")
        return [path]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        tokenizer_kwargs = {
            key: kwargs[key] for key in ("revision", "token", "cache_dir", "subfolder") if key in kwargs
        }
        values, _ = cls.get_processor_dict(pretrained_model_name_or_path, **kwargs)
        # Whoever runs this has trusted the folder's code; without the flag transformers asks again.
        tokenizer = AutoTokenizer.from_pretrained(
            pretrained_model_name_or_path, trust_remote_code=True, **tokenizer_kwargs
        )
        image = audio = None
        if "image_processor" in values:
            # The class trained with: another back end resizes a little differently.
            module, _, name = values["image_processor_class"].rpartition(".")
            image = getattr(importlib.import_module(module), name).from_dict(values["image_processor"])
        if "feature_extractor" in values:
            audio = WhisperFeatureExtractor.from_dict(values["feature_extractor"])
        return cls(
            image,
            audio,
            tokenizer,
            values["encoders"],
            values.get("chat_template") or tokenizer.chat_template,
        )


def _flat(media):
    """A flat list of media out of None, one, a list, or a list of lists with gaps."""
    if media is None:
        return []
    if isinstance(media, (list, tuple)):
        return [item for part in media for item in _flat(part)]
    return [media]
