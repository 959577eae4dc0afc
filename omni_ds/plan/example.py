"""Made-up samples for `--plan`: what a step looks like before any data are read."""

from __future__ import annotations

import random
from collections.abc import Callable

from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.plan import Plan
from omni_ds.plan.sample import Item, SampleMeta

MIXES = ("example", "image-heavy", "video-heavy", "audio-heavy", "text-only")
HEAVY_MEDIA = 3  # of a sample in a heavy mix, as far as they fit; one video


def mixes_of(plan: Plan) -> tuple[str, ...]:
    """The mixes that differ for the plan's encoders; a heavy one needs an encoder of its modality."""
    if not plan.encoders:
        return MIXES[:1]
    modalities = {modality for meta in plan.encoders for modality in meta.modalities}
    return tuple(mix for mix in MIXES if not mix.endswith("-heavy") or mix.split("-")[0] in modalities)


def example_samples(
    plan: Plan, batch_size: int, max_length: int, seed: int = 0, mix: str = "example"
) -> tuple[SampleMeta, ...]:
    """`batch_size` samples. Mix "example": most with one medium of one encoder in turn, every fourth text
    only. "image-heavy", "audio-heavy": most with several media of that modality, every eighth text only;
    "video-heavy": most with one video, every fourth text only. "text-only": without media.

    Text lengths are log-normal around a quarter of what a sample may have, media sizes between a quarter of
    the encoder's native size and all of it; half of the text is predicted. The same for the same arguments.
    """
    assert mix in MIXES, mix
    rng = random.Random(seed)
    limit = min(max_length, plan.options.max_tokens_per_micro_batch)
    heavy = mix.endswith("-heavy")
    wanted = mix.split("-")[0]
    encoders = [meta for meta in plan.encoders if mix == "example" or wanted in meta.modalities]
    every, media = (8, HEAVY_MEDIA) if heavy and wanted != "video" else (4, 1)
    samples = []
    for row in range(batch_size):
        text = max(2, min(limit // 2, int(limit / 8 * rng.lognormvariate(0, 0.7))))
        items: tuple[Item, ...] = ()
        if encoders and row % every != every - 1:
            for _ in range(media):
                used = sum(item.rows for item in items)
                meta = encoders[row % len(encoders)]
                make = meta.example_video if wanted == "video" else meta.example_shape
                items += _item(row, meta, make, len(items), used, limit - text, rng)
        tokens = text + sum(item.rows for item in items)
        samples.append(SampleMeta(row, tokens, max(1, text // 2), items, mix))
    return tuple(samples)


def _item(
    row: int,
    meta: EncoderMeta,
    make: Callable[[float], tuple[int, ...]],
    ordinal: int,
    start: int,
    stop: int,
    rng: random.Random,
) -> tuple[Item, ...]:
    """One medium whose features lie between tokens `start` and `stop` of the sample; none if it cannot. make:
    its shape by its scale."""
    scale = rng.choice((0.25, 0.5, 0.75, 1.0))
    while True:
        shape = make(scale)
        segments, rows = meta.measure(shape)
        if rows <= stop - start:
            return (Item(row, ordinal, meta.name, shape, segments, rows, ((start, rows),)),)
        if shape == make(0.0):
            return ()
        scale /= 2
