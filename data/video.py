"""Videos: when their frames are shown, and chosen frames as pictures. Files are read with PyAV.

Times are those of the packets, so variable frame rates are right, and nothing but the first frame is decoded
for them. Frames are turned as the display matrix of the file says.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image

from data.errors import MediaError
from data.media import MediaHeader, MediaRef, decode_image, open_file, read_header
from omni_ds.errors import UserError

_WORTH_SEEKING = 8  # frames; decoding fewer costs no more than finding the place
_SLACK = 2  # frames that a decoder may keep to itself at the end of a file


def video_header(ref: MediaRef) -> MediaHeader:
    """Size, times and rate of a video's frames; MediaError when it cannot be read."""
    return Video(ref).header


def decode_frames(ref: MediaRef, indices: Sequence[int]) -> list[Image.Image]:
    """RGB frames of these numbers, as displayed; MediaError when one cannot be decoded."""
    return Video(ref).frames(indices)


class Video:
    """A video whose packets are read once, for header and frames."""

    def __init__(self, ref: MediaRef):
        self.ref = ref

    @cached_property
    def header(self) -> MediaHeader:
        """As `video_header`."""
        frames = self.ref.frames
        if frames is not None:
            first, rate = read_header(frames[0]), self.ref.fps
            times = np.arange(len(frames)) / (rate or 1.0)
            return MediaHeader(
                "video",
                first.height,
                first.width,
                times=times,
                fps=rate or 0.0,
                listed=True,
            )
        return self._packets.header

    def frames(self, indices: Sequence[int]) -> list[Image.Image]:
        """As `decode_frames`."""
        wanted = sorted({int(index) for index in indices})
        if self.ref.frames is not None:
            made = {index: decode_image(self.ref.frames[index]) for index in wanted}
        else:
            made = _decoded(self.ref, self._packets, wanted)
        return [made[int(index)] for index in indices]

    @cached_property
    def _packets(self) -> "_Packets":
        return _read_packets(self.ref)


@dataclass(frozen=True)
class _Packets:
    """What the packets of a file say. stamps: of its frames in the stream's time base, increasing; None where
    the file does not tell. keys: those at which decoding can begin."""

    header: MediaHeader
    stamps: list[int] | None
    keys: list[int]


@contextmanager
def open_container(ref: MediaRef, what: str) -> Iterator[Any]:
    """The PyAV container of a file; what goes wrong in the block is a MediaError about the file."""
    try:
        import av
    except ImportError:
        raise UserError("data: a row has a video, and PyAV is not installed; pip install av") from None
    file = open_file(ref)
    try:
        with av.open(file) as container:
            yield container
    except MediaError:
        raise
    except (av.FFmpegError, ValueError, OverflowError, IndexError, OSError) as error:
        raise MediaError(f"{what} cannot be read", f"{ref}: {error}") from None


def _stream(ref: MediaRef, container: Any) -> Any:
    if not container.streams.video:
        raise MediaError("video file has no pictures", str(ref))
    stream = container.streams.video[0]
    stream.codec_context.thread_count = 1  # there are as many loader processes as cores already
    return stream


def _read_packets(ref: MediaRef) -> _Packets:
    stamps, keys, ends, first = [], [], [], None
    with open_container(ref, "video file") as container:
        stream = _stream(ref, container)
        for packet in container.demux(stream):
            if first is None:
                first = next(iter(packet.decode()), None)
            if not packet.size or packet.is_discard:
                continue
            stamps.append(packet.pts)
            if packet.pts is not None:
                ends.append(packet.pts + (packet.duration or 0))
                if packet.is_keyframe:
                    keys.append(packet.pts)
        if first is None:
            raise MediaError("video file cannot be read", f"{ref}: it has no frame")
        size = turned(Image.new("L", (first.width, first.height)), _matrix(first)).size
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        told = None not in stamps and len(set(stamps)) == len(stamps)
        if told:
            stamps.sort()
            times = (np.array(stamps, dtype=np.int64) - stamps[0]) * float(stream.time_base)
            rate = _rate(times, rate, (max(ends) - stamps[0]) * float(stream.time_base))
        else:
            rate = rate or 25.0  # what FFmpeg takes for a stream that says nothing
            times = np.arange(len(stamps)) / rate
    header = MediaHeader("video", size[1], size[0], times=times, fps=rate)
    return _Packets(header, stamps if told else None, sorted(keys))


def _rate(times: np.ndarray, said: float, duration: float) -> float:
    """Frames per second on average: what the container says unless its frames last otherwise."""
    if said and abs(len(times) / said - duration) <= 1.5 / said:
        return said
    return len(times) / duration if duration > 0 else said or 25.0


def _decoded(ref: MediaRef, packets: _Packets, wanted: Sequence[int]) -> dict[int, Image.Image]:
    """Frames by number. wanted: increasing."""
    with open_container(ref, "video file") as container:
        stream = _stream(ref, container)
        if packets.stamps is None:
            found = _counted(container.decode(stream), wanted)
        else:
            found = _sought(container, stream, packets, wanted)
            if found is None:  # the index of the file leads astray: from the beginning
                container.seek(packets.stamps[0], stream=stream)
                found = _passed(container.decode(stream), packets.stamps, wanted, None)[0]
        missing = [index for index in wanted if index not in found]
        if missing:
            raise MediaError(
                "video file cannot be decoded",
                f"{ref}: it ends before frame {missing[0]} of {len(packets.header.times)}",
            )
    return found


def _counted(frames: Iterator[Any], wanted: Sequence[int]) -> dict[int, Image.Image]:
    """By number, for files whose packets do not say when they are shown."""
    found, number, last = {}, -1, None
    for number, last in enumerate(frames):  # noqa: B007
        if number in wanted:
            found[number] = _picture(last)
        if number >= wanted[-1]:
            return found
    found |= {index: _picture(last) for index in wanted if number < index <= number + _SLACK and last}
    return found


def _sought(
    container: Any, stream: Any, packets: _Packets, wanted: Sequence[int]
) -> dict[int, Image.Image] | None:
    """By their times, from the nearest key frame where that saves decoding; None when a key frame is not
    where the packets say."""
    stamps, found, at, frames = packets.stamps, {}, None, container.decode(stream)
    groups: dict[int, list[int]] = {}  # by the key frame before them
    for index in wanted:
        place = bisect_right(packets.keys, stamps[index]) - 1
        groups.setdefault(place, []).append(index)
    for place, group in groups.items():
        key = packets.keys[place] if place >= 0 else None
        reached = bisect_right(stamps, at) if at is not None else 0
        sought = key is not None and bisect_right(stamps, key) - reached > _WORTH_SEEKING
        if sought:
            container.seek(key, stream=stream)
            frames = container.decode(stream)
        made, at = _passed(frames, stamps, group, at if not sought else None, began=key if sought else None)
        if made is None:
            return None
        found |= made
    return found


def _passed(
    frames: Iterator[Any],
    stamps: Sequence[int],
    wanted: Sequence[int],
    at: int | None,
    began: int | None = None,
) -> tuple[dict[int, Image.Image] | None, int | None]:
    """(pictures of wanted frames by number, stamp of the last decoded frame). A frame that the decoder leaves
    out is the one shown before it. began: stamp of the key frame that was sought; None instead of pictures
    when decoding begins behind it."""
    found, queue, last = {}, list(wanted), None
    for frame in frames:
        stamp = frame.pts
        if stamp is None:
            continue
        if began is not None and last is None and stamp > stamps[queue[0]]:
            return None, at
        while queue and stamps[queue[0]] < stamp:
            found[queue.pop(0)] = _picture(frame if last is None else last)
        if queue and stamps[queue[0]] == stamp:
            found[queue.pop(0)] = _picture(frame)
        last, at = frame, stamp
        if not queue:
            break
    if queue and last is not None:
        reached = bisect_right(stamps, last.pts) - 1
        found |= {index: _picture(last) for index in queue if index - reached <= _SLACK}
    return found, at


def _picture(frame: Any) -> Image.Image:
    return turned(Image.fromarray(frame.to_ndarray(format="rgb24")), _matrix(frame))


def _matrix(frame: Any) -> tuple[int, int, int, int]:
    """(a, b, c, d) of the display matrix: x' = a x + c y, y' = b x + d y, downwards."""
    for side in frame.side_data:
        if side.type.name == "DISPLAYMATRIX":
            a, b, _, c, d = np.frombuffer(bytes(side), dtype=np.int32)[:5].tolist()
            return a, b, c, d
    return 1, 0, 0, 1


def turned(image: Image.Image, matrix: tuple[int, int, int, int]) -> Image.Image:
    """An image after the nearest of the eight turns and reflections."""
    a, b, c, d = matrix
    if abs(a) + abs(d) < abs(b) + abs(c):
        image = image.transpose(Image.Transpose.TRANSPOSE)
        a, d = c, b
    if a < 0:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if d < 0:
        image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    return image
