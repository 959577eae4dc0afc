"""Spoken digits: the words zero to nine from espeak-ng in many English voices."""

from __future__ import annotations

import io
import random
import subprocess
from pathlib import Path

import numpy as np
import soundfile

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-rp", "en-gb-x-gbcwmd", "en-029")
HELD_OUT_ACCENT = "en-us-nyc"
# fmt: off
VARIANTS = (
    "Alex", "Alicia", "Andrea", "Andy", "Annie", "Denis", "Diogo", "Gene", "Gene2", "Henrique", "Hugo",
    "Jacky", "Lee", "Marco", "Mario", "Michael", "Mike", "Nguyen", "RicishayMax", "RicishayMax2",
    "RicishayMax3", "Storm", "adam", "anika", "announcer", "antonio", "aunty", "belinda", "benjamin",
    "boris", "caleb", "david", "ed", "edward", "edward2", "f1", "f2", "f3", "f4", "f5", "grandma",
    "grandpa", "gustave", "iven", "iven2", "iven3", "iven4", "john", "kaukovalta", "klatt", "klatt2",
    "klatt3", "klatt4", "linda", "m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8", "marcelo", "max", "michel",
    "miguel", "norbert", "pablo", "paul", "pedro", "quincy", "rob", "robert", "sandro", "shelby", "steph",
    "steph2", "steph3", "travis", "victor", "zac",
)
# fmt: on
HELD_OUT = 20  # voices
RATE = 16000
BLOCK = 1280  # samples, 80 ms
STEP = 128  # of 16-bit amplitude: 9 bits remain


def split_voices(seed: int) -> dict[str, list[str]]:
    """espeak-ng voice names `accent+variant`; a variant is in one split only, one accent only in eval."""
    rng = random.Random(f"{seed} voices")
    variants = rng.sample(VARIANTS, len(VARIANTS))
    voices = {"train": [], "eval": []}
    for index, variant in enumerate(variants):
        if index < HELD_OUT:
            accent = HELD_OUT_ACCENT if index % 4 == 0 else ACCENTS[index % len(ACCENTS)]
            voices["eval"].append(f"{accent}+{variant}")
        else:
            voices["train"].append(f"{ACCENTS[index % len(ACCENTS)]}+{variant}")
    return voices


def speak(digit: int, voice: str, path: Path, rng: random.Random) -> None:
    """Write one clip: 16 kHz mono FLAC, the word at a random speed, pitch and level.

    About half of the clips have up to 0.25 s of silence before and after the word.
    """
    from scipy.signal import resample_poly

    speed, pitch = rng.randint(120, 210), rng.randint(25, 75)
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", WORDS[digit]]
    wav = subprocess.run(command, check=True, capture_output=True).stdout
    samples, rate = soundfile.read(io.BytesIO(wav), dtype="float64")
    assert rate == 22050, rate
    samples = resample_poly(samples, 320, 441)
    loud = np.flatnonzero(np.abs(samples) > 0.01 * np.abs(samples).max())
    samples = samples[loud[0] : loud[-1] + 1]
    before, after = 0, 0
    if rng.random() < 0.5:
        before, after = rng.randint(0, RATE // 4), rng.randint(0, RATE // 4)
    after += -(before + len(samples) + after) % BLOCK
    samples = np.pad(samples, (before, after)) * (rng.uniform(0.3, 0.9) / np.abs(samples).max())
    quantised = (np.round(samples * 32767 / STEP) * STEP).astype(np.int16)
    soundfile.write(path, quantised, RATE, format="FLAC", subtype="PCM_16", compression_level=1.0)
