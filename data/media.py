"""Media of a row: where they are, what their headers say, and their decoded content (PIL, soundfile)."""

import base64
import binascii
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from data.errors import MediaError, RowError

_TRANSPOSING_ORIENTATIONS = (5, 6, 7, 8)  # EXIF values that exchange width and height
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class MediaRef:
    """One medium of a row; exactly one of path, content (encoded file) and array (decoded) is set.

    array: image [height, width(, channels)] uint8, or audio [samples(, channels)] float in [-1, 1].
    """

    modality: str
    path: str | None = None
    content: bytes | None = field(default=None, repr=False)
    array: np.ndarray | None = field(default=None, repr=False)
    sampling_rate: int | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return self.path
        return f"{len(self.content)} bytes" if self.content is not None else f"array {self.array.shape}"


@dataclass(frozen=True)
class MediaHeader:
    """Image: height and width in pixels as displayed (EXIF rotation applied). Audio: samples per channel,
    rate in Hz. siblings: how many media of this modality its row has, itself included.
    """

    modality: str
    height: int = 0
    width: int = 0
    samples: int = 0
    sampling_rate: int = 0
    siblings: int = 1


def media_ref(modality: str, value: Any, media_dir: Path) -> MediaRef:
    """A medium as it stands in a row: path, file or data URL, bytes, base64, HF feature dict, array, PIL
    image.
    """
    if isinstance(value, str):
        return _from_string(modality, value, media_dir)
    if isinstance(value, bytes | bytearray | memoryview):
        return MediaRef(modality, content=bytes(value))
    if isinstance(value, Image.Image):
        return MediaRef(modality, array=np.asarray(_rgb(_displayed(value))))
    if isinstance(value, np.ndarray):
        if modality == "audio":
            raise RowError("audio array without sampling_rate", 'give {"array": ..., "sampling_rate": ...}')
        return MediaRef(modality, array=value)
    if isinstance(value, Mapping):
        return _from_mapping(modality, value, media_dir)
    raise RowError(f"{modality} of unknown form", f"{type(value).__name__}; give a path, bytes or a data URL")


def _from_mapping(modality: str, value: Mapping[str, Any], media_dir: Path) -> MediaRef:
    given = {key: entry for key, entry in value.items() if entry is not None}
    if "bytes" in given:
        return MediaRef(modality, content=bytes(given["bytes"]))
    if "array" in given:
        array = np.asarray(given["array"])
        if modality == "audio" and "sampling_rate" not in given:
            raise RowError("audio array without sampling_rate", 'give {"array": ..., "sampling_rate": ...}')
        return MediaRef(modality, array=array, sampling_rate=given.get("sampling_rate"))
    if "data" in given or "base64" in given:
        return MediaRef(modality, content=_base64(modality, given.get("data") or given["base64"]))
    for key in ("path", "url", "file"):
        if key in given:
            return _from_string(modality, given[key], media_dir)
    raise RowError(
        f"{modality} of unknown form", f"an object with the keys {sorted(value)}; give path or bytes"
    )


def _from_string(modality: str, value: str, media_dir: Path) -> MediaRef:
    if value.startswith("data:"):
        head, _, body = value.partition(",")
        if not head.endswith(";base64"):
            raise RowError(f"{modality} data URL is not base64", head[:60])
        return MediaRef(modality, content=_base64(modality, body))
    if value.startswith(("http://", "https://")):
        raise RowError(f"{modality} is a web address", f"{value[:80]}; download it and give its path")
    return MediaRef(modality, path=str(media_dir / value.removeprefix("file://")))


def _base64(modality: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError(f"{modality} is not valid base64", str(error)) from None


def read_header(ref: MediaRef) -> MediaHeader:
    """Size or duration from the file's header alone; MediaError when there is none."""
    return _image_header(ref) if ref.modality == "image" else _audio_header(ref)


def _open(ref: MediaRef) -> Any:
    if ref.content is not None:
        return io.BytesIO(ref.content)
    if not Path(ref.path).is_file():
        raise MediaError(f"{ref.modality} file not found", str(ref))
    return ref.path


def _image_header(ref: MediaRef) -> MediaHeader:
    if ref.array is not None:
        height, width = _channels_last(ref.array).shape[:2]
        return MediaHeader("image", height=height, width=width)
    file = _open(ref)
    try:
        with Image.open(file) as image:
            width, height = _stored_size(image)
            if _says_orientation(image) and image.getexif().get(0x0112) in _TRANSPOSING_ORIENTATIONS:
                width, height = height, width
    except Exception as error:  # PIL plugins raise nearly anything on damaged files
        raise MediaError("image file cannot be read", f"{ref}: {error}") from None
    return MediaHeader("image", height=height, width=width)


def _stored_size(image: Image.Image) -> tuple[int, int]:
    """(width, height) before any rotation; newer releases of Pillow give a TIFF's size after it."""
    if image.format == "TIFF":
        return image.tag_v2[256], image.tag_v2[257]
    return image.size


def _says_orientation(image: Image.Image) -> bool:
    """Whether to ask a file for its orientation.

    For a PNG that has none before its pixels Pillow would decode them to look behind; here the lengths of the
    chunks are followed instead.
    """
    if image.format != "PNG" or image.info.keys() & {"exif", "Raw profile type exif", "xmp"}:
        return True
    file = image.fp
    at = file.tell()
    file.seek(len(_PNG_SIGNATURE))
    found = False
    while len(head := file.read(8)) == 8 and not found:
        found = head[4:] == b"eXIf"
        length = int.from_bytes(head[:4], "big")
        if head[4:] in (b"tEXt", b"zTXt", b"iTXt"):
            text = file.read(min(length, 32))
            found = text.startswith((b"Raw profile type exif", b"XML:com.adobe.xmp"))
            length -= len(text)
        file.seek(length + 4, 1)  # and the checksum
    file.seek(at)
    return found


def _audio_header(ref: MediaRef) -> MediaHeader:
    if ref.array is not None:
        return MediaHeader("audio", samples=ref.array.shape[0], sampling_rate=ref.sampling_rate)
    import soundfile

    file = _open(ref)
    try:
        info = soundfile.info(file)
    except Exception as error:
        raise MediaError(
            "audio file cannot be read", f"{ref}: {error} (WAV, FLAC, OGG, OPUS and MP3 can)"
        ) from None
    if info.frames <= 0:
        raise MediaError("audio file is empty", str(ref))
    return MediaHeader("audio", samples=info.frames, sampling_rate=info.samplerate)


def decode_image(ref: MediaRef) -> Image.Image:
    """RGB image as displayed. MediaError when the file is damaged."""
    if ref.array is not None:
        return _rgb(Image.fromarray(_channels_last(ref.array)))
    file = _open(ref)
    try:
        with Image.open(file) as image:
            image.load()
            return _rgb(_displayed(image))
    except Exception as error:
        raise MediaError("image file cannot be decoded", f"{ref}: {error}") from None


def _displayed(image: Image.Image) -> Image.Image:
    return ImageOps.exif_transpose(image)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # PIL would clip 16 bits to 8, not scale them
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def _channels_last(array: np.ndarray) -> np.ndarray:
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.ndim not in (2, 3) or array.dtype != np.uint8:
        raise RowError(
            "image array of unknown form", f"{array.dtype} {array.shape}; give uint8 [height, width, 3]"
        )
    return array


def decode_audio(ref: MediaRef, sampling_rate: int) -> np.ndarray:
    """Mono float32 samples at `sampling_rate` (Hz), resampled with soxr at its high quality."""
    samples, rate = _decoded(ref)
    if samples.ndim == 2:
        samples = samples.mean(axis=1)
    if rate == sampling_rate:
        return samples
    import soxr

    return soxr.resample(samples, rate, sampling_rate).astype(np.float32)


def _decoded(ref: MediaRef) -> tuple[np.ndarray, int]:
    if ref.array is not None:
        return ref.array.astype(np.float32), ref.sampling_rate
    import soundfile

    file = _open(ref)
    try:
        samples, rate = soundfile.read(file, dtype="float32")
    except Exception as error:
        raise MediaError("audio file cannot be decoded", f"{ref}: {error}") from None
    return samples, rate
