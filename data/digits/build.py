"""Build the bundled data set: written digits, spoken digits, and chat samples about them.

    python data/digits/build.py [--out DIR]

Needs scikit-learn, Pillow, soundfile, tokenizers, transformers and the program `espeak-ng`. The output is
committed, so that training needs none of these; every random choice comes from one seed.

Choices and what they cost:
- Images and clips are files shared by many rows; a row only names them.
- Held-out rows use digits no training image was made from and synthesizer voices no training clip has.
- Images have 17 grey levels and clips 9 bits: what load_digits holds, and half of the FLAC's size.
- Clips last a multiple of 80 ms, so a batch holds few different lengths and they can be encoded together.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path

import questions
import voices
from pictures import draw, split_digits
from vocabulary import build_tokenizer

SEED = 2024
SPLITS = ("train", "eval")
PLACEMENTS = {"train": 3, "eval": 1}
SPOKEN_ROWS = {"train": 1800, "eval": 200}
SUM_ROWS = {"train": 6000, "eval": 400}


def build_images(out: Path, split: str, rng: random.Random) -> dict[int, list[str]]:
    """Write the split's PNGs; returns file names, relative to `out`, by digit."""
    folder = out / "images" / split
    folder.mkdir(parents=True)
    names: dict[int, list[str]] = {digit: [] for digit in range(10)}
    for index, digit, pixels in split_digits(SEED)[split]:
        for placement in range(PLACEMENTS[split]):
            name = f"{digit}_{index:04d}_{placement}.png"
            draw(pixels, rng).save(folder / name, optimize=True)
            names[digit].append(f"images/{split}/{name}")
    return names


def build_audio(out: Path, split: str, rng: random.Random) -> dict[int, list[str]]:
    """Write the split's FLAC clips; returns file names, relative to `out`, by digit."""
    folder = out / "audio" / split
    folder.mkdir(parents=True)
    names: dict[int, list[str]] = {digit: [] for digit in range(10)}
    for voice in voices.split_voices(SEED)[split]:
        for digit in range(10):
            name = f"{digit}_{voice.replace('+', '_')}.flac"
            voices.speak(digit, voice, folder / name, rng)
            names[digit].append(f"audio/{split}/{name}")
    return names


def cycle(names: list[str], rng: random.Random):
    """Yield every name equally often, in a new order each time round."""
    while True:
        yield from rng.sample(names, len(names))


def media_rows(split: str, images: dict, audio: dict, rng: random.Random) -> dict[str, list[dict]]:
    """Rows of the tasks with media: `written` asks each image once, the others draw digits evenly."""
    next_image = {digit: cycle(names, rng) for digit, names in images.items()}
    next_clip = {digit: cycle(names, rng) for digit, names in audio.items()}
    written = [
        questions.row("written", digit, rng, images=[name])
        for digit, names in images.items()
        for name in names
    ]
    spoken = [
        questions.row("spoken", index % 10, rng, audios=[next(next_clip[index % 10])])
        for index in range(SPOKEN_ROWS[split])
    ]
    sums = []
    for index in range(SUM_ROWS[split]):
        first, second = divmod(index % 100, 10)
        media = {"images": [next(next_image[first])], "audios": [next(next_clip[second])]}
        sums.append(questions.row("sum", first + second, rng, **media))
    return {"written": written, "spoken": spoken, "sum": sums}


def write_rows(path: Path, rows: list[dict], rng: random.Random) -> None:
    lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows]
    rng.shuffle(lines)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    out = parser.parse_args().out
    if shutil.which("espeak-ng") is None:
        raise SystemExit("espeak-ng is not installed; on Debian: apt-get install espeak-ng")
    for name in ("images", "audio", "tokenizer"):
        shutil.rmtree(out / name, ignore_errors=True)
    text_rows = questions.text_rows(random.Random(SEED))
    for split in SPLITS:
        rng = random.Random(f"{SEED} {split}")
        images, audio = build_images(out, split, rng), build_audio(out, split, rng)
        for task, rows in (media_rows(split, images, audio, rng) | {"text": text_rows[split]}).items():
            write_rows(out / f"{split}_{task}.jsonl", rows, rng)
    build_tokenizer(questions.corpus()).save_pretrained(out / "tokenizer")


if __name__ == "__main__":
    main()
