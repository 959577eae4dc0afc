"""The sound of a video file, read with PyAV; `data/media.py` calls these for an audio with `track`."""

from typing import Any

import numpy as np

from data.errors import MediaError
from data.media import MediaHeader, MediaRef, decode_audio
from data.video import open_container


def decode_audio_track(ref: MediaRef, sampling_rate: int) -> np.ndarray:
    """Mono float32 samples of a video's sound at `sampling_rate` (Hz), as `decode_audio` makes of a clip.
    MediaError when there is none."""
    return decode_audio(ref.sound(), sampling_rate)


def has_track(ref: MediaRef) -> bool:
    """Whether a video file has sound; MediaError when it cannot be opened."""
    with open_container(ref, "video file") as container:
        return bool(container.streams.audio)


def track_header(ref: MediaRef) -> MediaHeader:
    """Samples per channel by the packets' times, and rate; MediaError when the file has no sound."""
    with open_container(ref, "sound of a video file") as container:
        stream = _stream(ref, container)
        rate, base = stream.codec_context.sample_rate, stream.time_base
        first, end = None, 0
        for packet in container.demux(stream):
            if not packet.size or packet.is_discard or packet.pts is None:
                continue
            first = packet.pts if first is None else min(first, packet.pts)
            end = max(end, packet.pts + (packet.duration or 0))
        if first is None:
            raise MediaError("video file has no sound", str(ref))
        samples = round((end - max(first, 0)) * base * rate)
    return MediaHeader("audio", samples=samples, sampling_rate=rate)


def decode_track(ref: MediaRef) -> tuple[np.ndarray, int]:
    """(float32 [samples, channels], Hz): as many samples as the header says, not what fills a last packet."""
    import av

    pieces = []
    with open_container(ref, "sound of a video file") as container:
        stream = _stream(ref, container)
        rate = stream.codec_context.sample_rate
        planar = av.AudioResampler(format="fltp", rate=rate)
        for frame in container.decode(stream):
            pieces += [piece.to_ndarray() for piece in planar.resample(frame)]
        pieces += [piece.to_ndarray() for piece in planar.resample(None)]
    if not pieces:
        raise MediaError("video file has no sound", str(ref))
    return np.concatenate(pieces, axis=1).T[: track_header(ref).samples], rate


def _stream(ref: MediaRef, container: Any) -> Any:
    if not container.streams.audio:
        raise MediaError("video file has no sound", str(ref))
    stream = container.streams.audio[0]
    stream.codec_context.thread_count = 1
    return stream
