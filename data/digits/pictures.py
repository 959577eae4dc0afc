"""Written digits: scikit-learn's 8 x 8 grey digits, drawn at several sizes, places and angles."""

from __future__ import annotations

import random

import numpy as np
from PIL import Image

HELD_OUT = 36  # digits of each class
SIZES = (16, 20, 24, 28, 32, 40, 48)  # pixels
FILTERS = (Image.Resampling.NEAREST, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)


def split_digits(seed: int) -> dict[str, list[tuple[int, int, np.ndarray]]]:
    """(index in load_digits, digit, [8, 8] array of 0..16) for each split; a digit is in one split only."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    held_out: set[int] = set()
    rng = random.Random(f"{seed} digits")
    for digit in range(10):
        held_out.update(rng.sample(np.flatnonzero(bunch.target == digit).tolist(), HELD_OUT))
    items = [(i, int(bunch.target[i]), bunch.images[i]) for i in range(len(bunch.target))]
    return {
        "train": [item for item in items if item[0] not in held_out],
        "eval": [item for item in items if item[0] in held_out],
    }


def draw(pixels: np.ndarray, rng: random.Random) -> Image.Image:
    """A grey image, 16..48 pixels a side (one in eight is not square), with the digit somewhere in it.

    The digit covers 90-100 % of the shorter side and is turned by at most 5 degrees.
    """
    size = rng.choice(SIZES)
    width, height = rng.choice([(size, size)] * 14 + [(size + 4, size), (size, size + 4)])
    side = round(size * rng.uniform(0.9, 1.0))
    digit = Image.fromarray((pixels * (255 / 16)).astype(np.uint8))
    # below 20 pixels the nearest pixel can drop a whole stroke
    digit = digit.resize((side, side), rng.choice(FILTERS if side >= 20 else FILTERS[1:]))
    if rng.random() < 0.3:
        digit = digit.rotate(rng.uniform(-5, 5), Image.Resampling.BILINEAR)
    canvas = Image.new("L", (width, height))
    canvas.paste(digit, (rng.randint(0, width - side), rng.randint(0, height - side)))
    levels = np.round(np.asarray(canvas, dtype=np.float64) * (16 / 255))
    return Image.fromarray((levels * (255 / 16)).astype(np.uint8))
