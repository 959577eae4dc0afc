"""Made-up samples for `--plan`: what a step looks like before any data are read."""

from __future__ import annotations

import random

from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.plan import Plan
from omni_ds.plan.sample import Item, SampleMeta


def example_samples(plan: Plan, batch_size: int, max_length: int, seed: int = 0) -> tuple[SampleMeta, ...]:
    """`batch_size` samples, most with one medium of one encoder in turn, every fourth text only.

    Text lengths are log-normal around a quarter of what a sample may have, media sizes between a quarter of
    the encoder's native size and all of it; half of the text is predicted. The same for the same arguments.
    """
    rng = random.Random(seed)
    limit = min(max_length, plan.options.max_tokens_per_micro_batch)
    samples = []
    for row in range(batch_size):
        text = max(2, min(limit // 2, int(limit / 8 * rng.lognormvariate(0, 0.7))))
        items: tuple[Item, ...] = ()
        if plan.encoders and row % 4 != 3:
            items = _item(row, plan.encoders[row % len(plan.encoders)], limit - text, rng)
        tokens = text + sum(item.rows for item in items)
        samples.append(SampleMeta(row, tokens, max(1, text // 2), items, "example"))
    return tuple(samples)


def _item(row: int, meta: EncoderMeta, room: int, rng: random.Random) -> tuple[Item, ...]:
    scale = rng.choice((0.25, 0.5, 0.75, 1.0))
    while True:
        shape = _shape(meta, scale)
        segments, rows = meta.measure(shape)
        if rows <= room:
            return (Item(row, 0, meta.name, shape, segments, rows, ((0, rows),)),)
        if shape == tuple(meta.minimal_shape()):
            return ()
        scale /= 2


def _shape(meta: EncoderMeta, scale: float) -> tuple[int, ...]:
    if meta.family == "vit":
        step = meta.minimal_shape()[0]
        side = max(step, int(meta.image * scale) // step * step)
        return side, side
    return (max(meta.minimal_shape()[0], int(meta.window * scale)),)
