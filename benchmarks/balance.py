"""How even encoders and LLM are loaded, before and after balancing, on seeded workloads.

    python benchmarks/balance.py [--steps 4] [--seed 0] [--json PATH]

No processes: steps of 4 stages x 8 replicas with 16 micro-batches each are planned; loads are FLOPs. Policies
deal samples to (replica, micro-batch) under the token budget, and media of every window to the ranks that may
encode them:

- as_given: samples in their order, media whole and to the ranks of their replica in turn
- longest_first: longest sample first to the least loaded micro-batch, longest medium first to the least
  loaded rank, by tokens
- squares: the same by squares of lengths, as other trainers balance
- ours: omni.balance.mode "auto", omni.encoder_parallel.long_short "auto"

Columns, mean over steps:

- window: encoder load of the ranks of a replica in a window, over what the plan wants each to do: 1 +
  largest excess / mean. Equal shares for the first three, which makes it largest / mean; ours wants more from
  stages that idle in the pipeline.
- least: what indivisible media allow there with equal shares at best: of k media on n ranks some rank has
  ceil(k / n) of the largest
- raw: largest / mean for all, wanted or not
- plan: as window, over the whole step: what a rank got too much of in one window it gets less of in the next
- step: encoder load of all ranks of the world in the step, largest / mean
- LLM: load of all micro-batches of the world, largest / mean; replica: of all replicas in the step
- seconds: to deal samples and media; of ours: to plan the whole step, schedule included

A window counts by its load. --json has `encoder_imbalance` (window), `llm_imbalance` and the others by name.
"""

from __future__ import annotations

import argparse
import heapq
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from anywhere, without an install

from benchmarks.parts.shapes import QWEN3_8B, SIGLIP_SO400M, WHISPER_LARGE
from omni_ds.config.parts import EncoderConfig
from omni_ds.plan.balance import ratio
from omni_ds.plan.build import Plan, PlanOptions, build_plan, build_step
from omni_ds.plan.cost import EncoderCost
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.llm_meta import LLMMeta
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.sample import Item, SampleMeta
from omni_ds.plan.shares import cut_windows

STAGES, REPLICAS, MICRO_BATCHES = 4, 8, 16
BUDGET, FILLED = 16384, 0.75  # tokens of a micro-batch: at most, and on average
SIDE = 42  # pixels: of a square of patches that makes a feature row
FRAMES = 3000  # mel frames: half a minute


@dataclass(frozen=True)
class Dealt:
    """samples[replica][micro-batch]; encoded[replica][window][rank]: cost; wanted: in the same shape, what
    the plan wants, in any unit for each window."""

    samples: list[list[list[SampleMeta]]]
    encoded: list[list[list[int]]]
    wanted: list[list[list[int]]]
    seconds: float


def make_plan(**options) -> Plan:
    sections = {
        "vision": EncoderConfig(
            config=SIGLIP_SO400M, modality="image", projector={"reduction": "pixel_shuffle", "factor": 3}
        ),
        "audio": EncoderConfig(
            config=WHISPER_LARGE, modality="audio", projector={"reduction": "frame_stack", "factor": 4}
        ),
    }
    llm = LLMMeta.from_config(QWEN3_8B)
    metas = tuple(
        EncoderMeta.from_config(name, section, section.config, llm.hidden)
        for name, section in sections.items()
    )
    options = PlanOptions(max_tokens_per_micro_batch=BUDGET, micro_batches=MICRO_BATCHES, **options)
    return build_plan(llm, metas, Mesh(STAGES, REPLICAS), options)


def sample_of(plan: Plan, row: int, text: int, media: Sequence[tuple[int, tuple[int, ...]]]) -> SampleMeta:
    """media: (which encoder, shape)."""
    items, offset = [], 4
    for ordinal, (which, shape) in enumerate(media):
        meta = plan.encoders[which]
        segments, rows = meta.measure(shape)
        items.append(Item(row, ordinal, meta.name, shape, segments, rows, ((offset, rows),)))
        offset += rows + 2
    return SampleMeta(row, offset + text, max(1, text // 2), tuple(items))


def image(rng: random.Random) -> tuple[int, tuple[int, int]]:
    """A photo of an uneven number of pixels: 0.1 to 1 million, log-normal, of some aspect ratio."""
    rows = max(49, min(576, 160 * rng.lognormvariate(0, 0.7)))
    aspect = rng.choice((0.75, 1.0, 1.33, 1.78))
    height = max(4, round((rows / aspect) ** 0.5))
    return 0, (SIDE * height, SIDE * max(4, round(rows / height)))


def text_length(rng: random.Random) -> int:
    return max(16, min(6000, int(500 * rng.lognormvariate(0, 0.9))))


def mixed(images: float) -> Callable:
    """Share of samples with images; the others are text."""

    def draw(plan: Plan, rng: random.Random, row: int) -> SampleMeta:
        if rng.random() >= images:
            return sample_of(plan, row, text_length(rng), ())
        return sample_of(
            plan, row, text_length(rng) // 3, [image(rng) for _ in range(rng.choice((1, 1, 2, 4)))]
        )

    return draw


def log_normal(plan: Plan, rng: random.Random, row: int) -> SampleMeta:
    """Text, images and clips, all of log-normal size."""
    media = []
    if rng.random() < 0.6:
        clip = max(20, min(10 * FRAMES, int(800 * rng.lognormvariate(0, 1.0))))
        media = [rng.choice((image(rng), image(rng), (1, (clip,))))]
    return sample_of(plan, row, text_length(rng), media)


def bimodal(plan: Plan, rng: random.Random, row: int) -> SampleMeta:
    """Thumbnails and short texts; one in eight has 1.8 megapixels and a long text."""
    if rng.random() < 0.125:
        return sample_of(plan, row, rng.randint(3000, 5000), [(0, (SIDE * 32, SIDE * 32))])
    return sample_of(plan, row, rng.randint(50, 200), [(0, (SIDE * 6, SIDE * rng.randint(5, 7)))])


def audio(plan: Plan, rng: random.Random, row: int) -> SampleMeta:
    """Recordings, the encoder tokens of which are 17 times those of the text."""
    text = max(16, min(700, int(150 * rng.lognormvariate(0, 0.8))))
    return sample_of(plan, row, text, [(1, (2 * 17 * text,))])


def giants(plan: Plan, rng: random.Random, row: int) -> SampleMeta:
    """Half images, half text; the first sample of a batch has an image of 4 megapixels."""
    if row == 0:
        return sample_of(plan, row, 100, [(0, (SIDE * 48, SIDE * 48))])
    return mixed(0.5)(plan, rng, row)


def long_audio(plan: Plan, rng: random.Random, row: int) -> SampleMeta:
    """Images and text; the first sample has a recording of ten minutes."""
    if row == 0:
        return sample_of(plan, row, 100, [(1, (20 * FRAMES,))])
    return mixed(0.5)(plan, rng, row)


WORKLOADS: dict[str, Callable] = {
    **{f"image:text {n}:{10 - n}": mixed(n / 10) for n in (1, 3, 5, 7, 9)},
    "log-normal": log_normal,
    "bimodal": bimodal,
    "audio 17x text": audio,
    "giant image": giants,
    "ten-minute audio": long_audio,
}


def make_batch(plan: Plan, draw: Callable, seed: int) -> list[SampleMeta]:
    """As many samples as fill the micro-batches on average."""
    rng, samples, tokens = random.Random(seed), [], 0
    while tokens < FILLED * BUDGET * REPLICAS * MICRO_BATCHES:
        samples.append(draw(plan, rng, len(samples)))
        tokens += samples[-1].tokens
    return samples


def as_given(plan: Plan, samples: list[SampleMeta], windows) -> Dealt:
    began = time.perf_counter()
    bins = _greedy_bins(samples, lambda _: 0, in_order=True)
    encoded, cost = [], EncoderCost(plan.encoders)
    for replica in bins:
        turn, rows = 0, []
        for window in windows:
            loads = [0] * STAGES
            for item in _items(replica, window):
                loads[turn % STAGES] += cost.total(item)
                turn += 1
            rows.append(loads)
        encoded.append(rows)
    return Dealt(bins, encoded, _even(encoded), time.perf_counter() - began)


def greedy(power: int) -> Callable:
    """Largest length to the power first, to the least loaded."""

    def deal(plan: Plan, samples: list[SampleMeta], windows) -> Dealt:
        began = time.perf_counter()
        bins = _greedy_bins(samples, lambda sample: sample.tokens**power)
        dealt = []
        for replica in bins:
            for window in windows:
                weights = [(sum(n**power for n in item.segments), item) for item in _items(replica, window)]
                heap, parts = [(0, r) for r in range(STAGES)], [[] for _ in range(STAGES)]
                for weight, item in sorted(weights, key=lambda pair: -pair[0]):
                    load, rank = heap[0]
                    heapq.heapreplace(heap, (load + weight, rank))
                    parts[rank].append(item)
                dealt.append(parts)
        seconds = time.perf_counter() - began
        cost = EncoderCost(plan.encoders)
        loads = [[cost.whole(part) for part in parts] for parts in dealt]
        encoded = [loads[i : i + len(windows)] for i in range(0, len(loads), len(windows))]
        return Dealt(bins, encoded, _even(encoded), seconds)

    return deal


def _greedy_bins(samples, weight, *, in_order: bool = False) -> list[list[list[SampleMeta]]]:
    """Samples to (replica, micro-batch), the dearest first to the bin with least that has room; in_order: in
    their order to the bins one after another, as many tokens each."""
    count = REPLICAS * MICRO_BATCHES
    bins: list[list[SampleMeta]] = [[] for _ in range(count)]
    if in_order:
        for i, sample in enumerate(samples):
            bins[i * count // len(samples)].append(sample)
    else:
        heap, used = [(0, b) for b in range(count)], [0] * count
        for sample in sorted(samples, key=lambda sample: -weight(sample)):
            passed = []
            while used[heap[0][1]] + sample.tokens > BUDGET:
                passed.append(heapq.heappop(heap))
            load, b = heap[0]
            heapq.heapreplace(heap, (load + weight(sample), b))
            used[b] += sample.tokens
            bins[b].append(sample)
            for entry in passed:
                heapq.heappush(heap, entry)
    return [bins[r * MICRO_BATCHES : (r + 1) * MICRO_BATCHES] for r in range(REPLICAS)]


def _items(replica, window) -> list[Item]:
    return [item for m in window for sample in replica[m] for item in sample.items]


def _even(encoded) -> list[list[list[int]]]:
    return [[[1] * len(window) for window in replica] for replica in encoded]


def ours(plan: Plan, samples: list[SampleMeta], windows) -> Dealt:
    began = time.perf_counter()
    step = build_step(plan, 0, samples)
    seconds = time.perf_counter() - began
    cost = EncoderCost(plan.encoders)
    bins = [[list(mb.samples) for mb in replica.micro_batches] for replica in step.replicas]
    groups = plan.mesh.encoder_groups()
    encoded = [
        [
            [
                sum(cost.total(p.item) for _, share in step.shares(rank, w) for p in share.items)
                for rank in groups[d]
            ]
            for w in range(len(replica.members))
        ]
        for d, replica in enumerate(step.replicas)
    ]
    rooms = step.rooms or _even(encoded[:1])[0]
    return Dealt(bins, encoded, [rooms] * REPLICAS, seconds)


POLICIES: dict[str, Callable] = {
    "as_given": as_given,
    "longest_first": greedy(1),
    "squares": greedy(2),
    "ours": ours,
}


def measure(plan: Plan, dealt: Dealt) -> dict[str, float]:
    passes, cost = 3, EncoderCost(plan.encoders)

    def flops(bin_: Sequence[SampleMeta]) -> int:
        return passes * sum(plan.llm.sample_flops(s.tokens, s.target_tokens) for s in bin_)

    micro_batches = [[flops(mb) for mb in replica] for replica in dealt.samples]
    planned = raw = bound = excess = total = 0.0
    for replica, loads, rooms in zip(dealt.samples, dealt.encoded, dealt.wanted, strict=True):
        ahead = [0.0] * STAGES
        for members, window, room in zip(windows(dealt, loads), loads, rooms, strict=True):
            load = sum(window)
            if not load:
                continue
            over = [x - load * r / max(1, sum(room)) for x, r in zip(window, room, strict=True)]
            planned += load + len(window) * max(over)
            raw += max(window) * len(window)
            bound += least([cost.total(item) for item in _items(replica, members)], len(window))
            total += load
            ahead = [x + y for x, y in zip(ahead, over, strict=True)]
        excess += len(ahead) * max(ahead)
    ranks = [sum(column) for replica in dealt.encoded for column in zip(*replica, strict=True)]
    return {
        "encoder_imbalance": planned / max(1, total),
        "encoder_least": bound / max(1, total),
        "encoder_imbalance_raw": raw / max(1, total),
        "encoder_imbalance_plan": 1 + excess / max(1, total),
        "encoder_imbalance_step": ratio(ranks),
        "llm_imbalance": ratio([load for replica in micro_batches for load in replica]),
        "llm_imbalance_replica": ratio([sum(replica) for replica in micro_batches]),
        "seconds": dealt.seconds,
    }


def windows(dealt: Dealt, loads: Sequence) -> tuple[tuple[int, ...], ...]:
    return cut_windows(MICRO_BATCHES, -(-MICRO_BATCHES // len(loads)))


def least(costs: Sequence[int], ranks: int) -> int:
    """Ranks x the smallest largest load that whole media allow."""
    costs = sorted(costs, reverse=True)
    return max(sum(costs), *(ranks * (k // ranks + 1) * costs[k] for k in range(0, len(costs), ranks)))


COLUMNS = ("window", "least", "raw", "plan", "step", "LLM", "replica", "seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="global batches of each workload")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    plan, rows = make_plan(), []
    print(f"{'':>18} {'':>14} " + " ".join(f"{name:>8}" for name in COLUMNS))
    for workload, draw in WORKLOADS.items():
        batches = [make_batch(plan, draw, args.seed + step) for step in range(args.steps)]
        windows = build_step(plan, 0, batches[0]).replicas[0].members
        for policy, deal in POLICIES.items():
            found = [measure(plan, deal(plan, batch, windows)) for batch in batches]
            row = {key: statistics.mean(one[key] for one in found) for key in found[0]}
            rows.append({"workload": workload, "policy": policy, **row})
            print(f"{workload:>18} {policy:>14} " + " ".join(f"{value:>8.3f}" for value in row.values()))
    for policy in POLICIES:
        mine = [row for row in rows if row["policy"] == policy]
        means = [statistics.mean(row[key] for row in mine) for key in list(mine[0])[2:]]
        print(f"{'mean':>18} {policy:>14} " + " ".join(f"{value:>8.3f}" for value in means))
    print(
        f"{STAGES} stages x {REPLICAS} replicas, {MICRO_BATCHES} micro-batches; Python "
        f"{platform.python_version()}, {platform.machine()}, one process"
    )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
