"""Seeded samples and their tensors, made on the device instead of loaded; and what a device can do.

Image workloads are named by the share of the LLM's tokens that come from images: of 3:7, three in ten are
feature rows. Audio 17x: the encoder's tokens are 17 times those of the text.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from data.loader import work_of
from models.packed import PackedBatch
from omni_ds.engine.step import StepInput
from omni_ds.engine.step_input import local_batch
from omni_ds.plan.batch import MicroBatch
from omni_ds.plan.build import Plan, StepPlan
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.sample import Item, SampleMeta

IMAGE_SHARES = {f"image:text {n}:{10 - n}": n / 10 for n in (1, 3, 5, 7, 9)}
AUDIO = "audio 17x text"
WORKLOADS = (*IMAGE_SHARES, AUDIO)


def draw_samples(
    workload: str, encoders: Sequence[EncoderMeta], tokens: int, longest: int, seed: int
) -> tuple[SampleMeta, ...]:
    """Samples of a workload until they have `tokens`; each has at most `longest`. Sizes follow `longest`."""
    rng, samples, media, total = random.Random(f"{workload} {seed}"), [], 0, 0
    metas = {meta.modality: meta for meta in encoders}
    while total < tokens:
        row = len(samples)
        if workload == AUDIO:
            sample = _recording(metas["audio"], row, longest, rng)
        elif media < IMAGE_SHARES[workload] * total or (not row and IMAGE_SHARES[workload] >= 0.5):
            sample = _images(metas["image"], row, longest, rng)
        else:
            length = _between(longest // 128, longest // 16 * rng.lognormvariate(0, 0.8), longest // 2)
            sample = SampleMeta(row, length, max(1, length // 2), ())
        samples.append(sample)
        total += sample.tokens
        media += sum(item.rows for item in sample.items)
    return tuple(samples)


def _images(meta: EncoderMeta, row: int, longest: int, rng: random.Random) -> SampleMeta:
    """One to three images, their areas log-normal, and a short text."""
    side, media = meta.patch * meta.factor, []
    for _ in range(rng.choice((1, 1, 2, 3))):
        blocks = _between(4, longest // 32 * rng.lognormvariate(0, 0.9), longest // 4)
        high = max(1, round(math.sqrt(blocks) * rng.uniform(0.7, 1.4)))
        media.append((high * side, max(1, blocks // high) * side))
    return _sample(meta, row, media, rng.randint(4, max(5, longest // 128)))


def _recording(meta: EncoderMeta, row: int, longest: int, rng: random.Random) -> SampleMeta:
    text = _between(4, longest // 32 * rng.lognormvariate(0, 0.8), longest // 6)
    return _sample(meta, row, [(2 * 17 * text,)], text)  # the encoder has a token for two frames


def _sample(meta: EncoderMeta, row: int, shapes: Sequence[tuple[int, ...]], text: int) -> SampleMeta:
    items, offset = [], 1
    for ordinal, shape in enumerate(shapes):
        segments, rows = meta.measure(shape)
        items.append(Item(row, ordinal, meta.name, shape, segments, rows, ((offset, rows),)))
        offset += rows + 1
    return SampleMeta(row, offset + text, max(1, text // 2), tuple(items))


def _between(low: int, value: float, high: int) -> int:
    return int(min(high, max(low, value)))


def step_input(
    plan: Plan,
    step: StepPlan,
    samples: Sequence[SampleMeta],
    rank: int,
    device: torch.device,
    *,
    measure: bool = False,
    position_kinds: int = 1,
) -> StepInput:
    """What a rank holds of a step: random tokens of its shards and lanes and noise for the media that it
    encodes, the same for a sample wherever it goes.

    samples: as they were given to build_step, before long recordings were divided. position_kinds: 3 where
    rotary positions have a time, a height and a width, which are the same here.
    """
    replica, where = step.replica_of(rank), plan.mesh.coords(rank)
    batches = {
        mb.index: local_batch(
            _packed(mb, plan.llm.vocab, position_kinds), replica.bounds(mb), where, replica.tensor
        ).to(device)
        for mb in replica.micro_batches
    }
    metas = {meta.name: meta for meta in plan.encoders}
    shapes = {(item.row, item.ordinal): item.shape for sample in samples for item in sample.items}
    media: dict[int, dict[str, list[Tensor]]] = {}
    long_media: dict[int, list[Tensor]] = {}
    for window in replica.windows:
        for placed in work_of(step, rank, window.index):
            item, medium = placed.item, (placed.item.row, placed.item.ordinal)
            value = _noise(metas[item.encoder], medium, shapes[medium], device)
            value = value[..., item.start : item.start + item.shape[-1]].contiguous()
            if item.gang > 1:
                long_media.setdefault(window.index, []).append(value)
            else:
                media.setdefault(window.index, {}).setdefault(item.encoder, []).append(value)
    return StepInput(step, batches, media, step.target_tokens, step.tokens, measure, long_media)


def _noise(
    meta: EncoderMeta, medium: tuple[int, int], shape: tuple[int, ...], device: torch.device
) -> Tensor:
    generator = torch.Generator(device).manual_seed(1 + medium[0] * 64 + medium[1])
    lead = meta.mels if meta.modality == "audio" else meta.channels
    return torch.randn((lead, *shape), generator=generator, device=device)


def _packed(batch: MicroBatch, vocabulary: int, position_kinds: int) -> PackedBatch:
    """The whole micro-batch on the CPU."""
    ids, targets, places, owners, features = [], [], [], [], []
    for n, (sample, start) in enumerate(zip(batch.samples, batch.cu_seqlens, strict=False)):
        generator = torch.Generator().manual_seed(sample.row)
        tokens = torch.randint(2, vocabulary, (sample.tokens + 1,), generator=generator)
        first = sample.tokens - sample.target_tokens
        ids.append(tokens[:-1])
        targets.append(tokens[1 + first :])
        places.append(torch.arange(start + first, start + sample.tokens))
        owners.append(torch.full((sample.target_tokens,), n))
        features += [start + at + i for item in sample.items for at, rows in item.spans for i in range(rows)]
    none = torch.zeros(0, dtype=torch.int64)
    positions = torch.cat([none, *(torch.arange(length) for length in batch.lengths)])
    return PackedBatch(
        input_ids=torch.cat([none, *ids]),
        position_ids=positions if position_kinds == 1 else positions.expand(position_kinds, -1),
        cu_seqlens=torch.tensor(batch.cu_seqlens, dtype=torch.int32),
        max_seqlen=batch.max_seqlen,
        segments=batch.lengths,
        target_positions=torch.cat([none, *places]),
        target_ids=torch.cat([none, *targets]),
        sample_of_target=torch.cat([none, *owners]),
        feature_positions=torch.tensor(sorted(features), dtype=torch.int64),
    )


def model_flops(plan: Plan, samples: Sequence[SampleMeta]) -> int:
    """Forward and backward FLOPs of a step that arithmetic needs, without recomputation."""
    metas, total = {meta.name: meta for meta in plan.encoders}, 0
    for sample in samples:
        llm = plan.llm.sample_flops(sample.tokens, sample.target_tokens)
        total += llm * (2 + plan.llm.trainable)
        for item in sample.items:
            meta = metas[item.encoder]
            total += meta.forward_flops(item.segments, item.rows)
            total += meta.backward_flops(item.segments, item.rows)
    return total


def matmul_rate(device: torch.device) -> float:
    """FLOP/s of a bf16 product of 8192 x 8192 matrices."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(8):
        start = now(device)
        a @ b
        times.append(now(device) - start)
    return 2 * size**3 / min(times)


def now(device: torch.device) -> float:
    """Seconds of this host's clock, when the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def drawn_on_device(device: torch.device) -> Iterator[None]:
    """Fresh weights from generators of the device with the seeds of the CPU's, which takes a minute for three
    billion of them. The same on all ranks and layouts."""
    original = torch.Tensor.normal_

    def normal(tensor, mean=0.0, std=1.0, *, generator=None):
        seeded = torch.Generator(device)
        if generator is not None:
            seeded.manual_seed(generator.initial_seed())
        return tensor.copy_(torch.randn(tensor.shape, device=device, generator=seeded) * std + mean)

    if device.type == "cuda":
        torch.Tensor.normal_ = normal
    try:
        yield
    finally:
        torch.Tensor.normal_ = original
