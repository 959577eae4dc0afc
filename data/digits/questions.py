"""Chat rows: the ways to ask, and the rows of plain arithmetic."""

from __future__ import annotations

import random
from collections.abc import Iterator

QUESTIONS = {
    "written": (
        "<image>Which digit is written?",
        "<image>Which digit is this?",
        "<image>What digit do you see?",
        "<image>Read the digit.",
        "Which digit is in the image?<image>",
        "Read the written digit.<image>",
    ),
    "spoken": (
        "<audio>Which digit is spoken?",
        "<audio>Which digit is this?",
        "<audio>What digit do you hear?",
        "<audio>Name the digit.",
        "Which digit is in the audio?<audio>",
        "Name the spoken digit.<audio>",
    ),
    "sum": (
        "<image><audio>What is the sum?",
        "<image><audio>Add the two digits.",
        "<image> plus <audio> is?",
        "<image> + <audio> =",
        "What is <image> + <audio>?",
        "Add the written digit <image> and the spoken digit <audio>.",
    ),
    "+": (
        "What is {} + {}?",
        "{} + {} =",
        "{} plus {} is?",
        "Add {} and {}.",
        "What is the sum of {} and {}?",
    ),
    "-": ("What is {} - {}?", "{} - {} =", "{} minus {} is?", "What is {} minus {}?"),
}
SYSTEM = "Answer with a number."
HELD_OUT_TEXT = 0.15  # share of the (fact, question) pairs


def row(task: str, answer: int, rng: random.Random, **media: list[str]) -> dict:
    """One sample in `messages` form; `media` are the columns `images` and `audios`."""
    return _row(task, rng.choice(QUESTIONS[task]), answer, rng) | media


def text_rows(rng: random.Random) -> dict[str, list[dict]]:
    """Sums and differences of two digits; a (fact, question) pair is in one split only."""
    facts = [("+", a, b, a + b) for a in range(10) for b in range(10)]
    facts += [("-", a, b, a - b) for a in range(10) for b in range(a + 1)]
    splits: dict[str, list[dict]] = {"train": [], "eval": []}
    for sign, a, b, answer in facts:
        for question in QUESTIONS[sign]:
            split = "eval" if rng.random() < HELD_OUT_TEXT else "train"
            splits[split].append(_row("text", question.format(a, b), answer, rng))
    return splits


def corpus() -> Iterator[str]:
    """Every text the tokenizer is trained on."""
    yield SYSTEM
    for questions in QUESTIONS.values():
        for question in questions:
            yield question.replace("<image>", "").replace("<audio>", "").format(1, 2)
    for answer in range(19):
        yield str(answer)


def _row(task: str, question: str, answer: int, rng: random.Random) -> dict:
    system = [{"role": "system", "content": SYSTEM}] if rng.random() < 0.1 else []
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": str(answer)}]
    return {"task": task, "messages": system + turns}
