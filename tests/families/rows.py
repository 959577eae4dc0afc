"""Rows with media of every kind a family takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_rows(
    folder: Path,
    count: int = 16,
    media: Sequence[str] = ("image",),
    longest: float = 1.0,
    sound: bool = False,
) -> Path:
    """Rows of text alone, of one medium, and of two of different sizes; returns the file. Several kinds of
    media take turns. longest: seconds that a clip may have. sound: files of videos have some."""
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    rows = []
    for number in range(count):
        columns: dict[str, list[Any]] = {}
        question = ""
        for nth in range(number % 3):
            modality = media[(number // 3 + nth) % len(media)]
            more = {"sound": sound} if modality == "video" else {}
            made = _MAKE[modality](folder, f"{number}-{nth}", rng, longest, **more)
            columns.setdefault(f"{modality}s", []).append(made)
            question += f"<{modality}>Which digit {nth}? "
        messages = [
            {"role": "user", "content": question or "What is 3 + 4?"},
            {"role": "assistant", "content": ["seven", "It is three.", "two and one"][number % 3]},
        ]
        if number % 4 == 3:
            messages += [
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": "Yes, it is."},
            ]
        rows.append({"messages": messages} | columns)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _image(folder: Path, name: str, rng: Any, longest: float) -> str:
    import numpy as np
    from PIL import Image

    height, width = (int(x) for x in rng.integers(14, 60, 2))
    Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    return f"{name}.png"


def _audio(folder: Path, name: str, rng: Any, longest: float) -> str:
    import soundfile

    height, width = (int(x) for x in rng.integers(14, 60, 2))
    seconds = longest * (1.0 if height > 50 else width / 60)  # up to the longest, which some have
    soundfile.write(folder / f"{name}.wav", rng.uniform(-0.5, 0.5, int(16000 * seconds)), 16000)
    return f"{name}.wav"


def _video(folder: Path, name: str, rng: Any, longest: float, sound: bool) -> Any:
    """A file of 10 frames a second, up to 3 s; or, one in three, a list of up to 5 frames, 1.5 a second."""
    import numpy as np
    from PIL import Image
    from videos import write_video

    height, width, count = int(rng.integers(16, 40)), int(rng.integers(16, 40)), int(rng.integers(2, 31))
    listed = count % 3 == 0
    count = min(count, 5) if listed else count
    frames = rng.integers(0, 255, (count, height, width, 3), dtype=np.uint8)
    if listed:
        names = [f"{name}-{index}.png" for index in range(count)]
        for frame, file in zip(frames, names, strict=True):
            Image.fromarray(frame).save(folder / file)
        return {"frames": names, "fps": 1.5}
    heard = rng.uniform(-0.5, 0.5, 1600 * count) if sound else None
    write_video(folder / f"{name}.mp4", list(frames), [100 * index for index in range(count)], sound=heard)
    return f"{name}.mp4"


_MAKE = {"image": _image, "audio": _audio, "video": _video}
