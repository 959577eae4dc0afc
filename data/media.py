"""Media of a row: where they are, what their headers say, and their decoded content (PIL, soundfile).

Video files are read in `data/video.py`, their sound in `data/audio_track.py`.
"""

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from data.errors import MediaError, RowError

_TRANSPOSING_ORIENTATIONS = (5, 6, 7, 8)  # EXIF values that exchange width and height
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class MediaRef:
    """One medium of a row; exactly one of path, content (encoded file), array (decoded) and frames is set.

    array: image [height, width(, channels)] uint8, or audio [samples(, channels)] float in [-1, 1]. frames:
    images of a video that is given as a list; fps: how many of them make a second, None when the row does
    not say. track: an audio that is the sound of a video file.
    """

    modality: str
    path: str | None = None
    content: bytes | None = field(default=None, repr=False)
    array: np.ndarray | None = field(default=None, repr=False)
    sampling_rate: int | None = None
    frames: "tuple[MediaRef, ...] | None" = field(default=None, repr=False)
    fps: float | None = None
    track: bool = False

    def sound(self) -> "MediaRef":
        """The audio track of a video file, as an audio of its own."""
        return replace(self, modality="audio", track=True)

    def __str__(self) -> str:
        if self.path is not None:
            return self.path
        if self.frames is not None:
            return f"{len(self.frames)} frames, the first {self.frames[0]}"
        return f"{len(self.content)} bytes" if self.content is not None else f"array {self.array.shape}"


@dataclass(frozen=True)
class MediaHeader:
    """Image: height and width in pixels as displayed (EXIF rotation applied). Audio: samples per channel,
    rate in Hz. Video: height and width of a frame as displayed; times: float64 [frames], seconds since the
    first, not decreasing; fps: frames per second on average, 0.0 for a list of frames that does not say;
    listed: whether it is such a list. siblings: how many media of this modality its row has, itself
    included.
    """

    modality: str
    height: int = 0
    width: int = 0
    samples: int = 0
    sampling_rate: int = 0
    times: np.ndarray = field(default_factory=lambda: np.zeros(0), repr=False, compare=False)
    fps: float = 0.0
    listed: bool = False
    siblings: int = 1


def media_ref(modality: str, value: Any, media_dir: Path) -> MediaRef:
    """A medium as it stands in a row: path, file or data URL, bytes, base64, HF feature dict, array, PIL
    image; a video also as a list of images or an array of them.
    """
    if isinstance(value, str):
        return _from_string(modality, value, media_dir)
    if isinstance(value, bytes | bytearray | memoryview):
        return MediaRef(modality, content=bytes(value))
    if isinstance(value, Image.Image):
        return MediaRef(modality, array=np.asarray(_rgb(_displayed(value))))
    if modality == "video" and isinstance(value, np.ndarray | Sequence):
        return _from_frames(value, None, media_dir)
    if isinstance(value, np.ndarray):
        if modality == "audio":
            raise RowError("audio array without sampling_rate", 'give {"array": ..., "sampling_rate": ...}')
        return MediaRef(modality, array=value)
    if isinstance(value, Mapping):
        return _from_mapping(modality, value, media_dir)
    raise RowError(f"{modality} of unknown form", f"{type(value).__name__}; give a path, bytes or a data URL")


def _from_mapping(modality: str, value: Mapping[str, Any], media_dir: Path) -> MediaRef:
    given = {key: entry for key, entry in value.items() if entry is not None}
    frames = next((given[key] for key in ("frames", "array") if key in given), None)
    if modality == "video" and frames is not None:
        return _from_frames(frames, given.get("fps"), media_dir)
    if modality == "video" and "fps" in given:
        raise RowError(
            "fps of a video file", "its frames say when they are shown; fps goes with a list of frames"
        )
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


def _from_frames(frames: Sequence[Any], fps: Any, media_dir: Path) -> MediaRef:
    if len(frames) == 0:
        raise RowError("video without frames")
    if fps is not None and not (isinstance(fps, int | float) and fps > 0):
        raise RowError("fps of a video is not a positive number", repr(fps))
    refs = tuple(media_ref("image", frame, media_dir) for frame in frames)
    return MediaRef("video", frames=refs, fps=None if fps is None else float(fps))


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
    """Size or duration from the file's header alone (video: its packets'); MediaError when there is none."""
    if ref.modality == "video":
        from data.video import video_header

        return video_header(ref)
    return _image_header(ref) if ref.modality == "image" else _audio_header(ref)


def open_file(ref: MediaRef) -> Any:
    """Path or in-memory file of a medium that is not decoded; MediaError when there is no file."""
    if ref.content is not None:
        return io.BytesIO(ref.content)
    if not Path(ref.path).is_file():
        raise MediaError(f"{ref.modality} file not found", str(ref))
    return ref.path


def _image_header(ref: MediaRef) -> MediaHeader:
    if ref.array is not None:
        height, width = _channels_last(ref.array).shape[:2]
        return MediaHeader("image", height=height, width=width)
    file = open_file(ref)
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
    if ref.track:
        from data.audio_track import track_header

        return track_header(ref)
    import soundfile

    file = open_file(ref)
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
    file = open_file(ref)
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
    if ref.track:
        from data.audio_track import decode_track

        return decode_track(ref)
    import soundfile

    file = open_file(ref)
    try:
        samples, rate = soundfile.read(file, dtype="float32")
    except Exception as error:
        raise MediaError("audio file cannot be decoded", f"{ref}: {error}") from None
    return samples, rate
