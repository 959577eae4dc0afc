"""Random training: modalities, meshes and long-short options drawn anew, on forked ranks.

    python tests/distributed/fuzz.py [--steps 1000] [--block 25] [--seed 0] [--only BLOCK]

Every block of steps draws a mesh of 4 ranks, thresholds for long items and how often a sample has media (in
some blocks never), then trains a tiny model. A hang ends with the stack of the rank that hung.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from ranks import run_ranks
from tiny import DIGITS, config_dict, make_checkpoints, write_config

RANKS = 4
ROWS = 160  # of a block's data
DEGREES = (  # pipeline, tensor, sequence; data is what remains
    (1, 1, 1),
    (2, 1, 1),
    (4, 1, 1),
    (1, 2, 1),
    (1, 1, 2),
    (2, 2, 1),
    (2, 1, 2),
    (1, 2, 2),
)


@dataclass(frozen=True)
class Tally:
    """Over all steps; split: those with parts or slices; half: with one of two modalities only; away: in
    which some rank encoded nothing though others did."""

    steps: int = 0
    without_media: int = 0
    half: int = 0
    away: int = 0
    split: int = 0
    sliced: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(x + y for x, y in zip(self.numbers, other.numbers, strict=True)))

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.steps, self.without_media, self.half, self.away, self.split, self.sliced)


def draw_rows(rng: random.Random, media: float, count: int) -> list[dict]:
    """Dialogues with no, one or several media."""
    images = sorted((DIGITS / "images" / "train").iterdir())
    audios = sorted((DIGITS / "audio" / "train").iterdir())
    rows = []
    for _ in range(count):
        kinds = []
        if rng.random() < media:
            kinds = rng.choice((["image"], ["audio"], ["image", "audio"], ["image"] * 3, ["audio"] * 2))
        text = "".join(f"<{kind}>" for kind in kinds) + rng.choice(
            ("What is the sum?", "Which digit is this?")
        )
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": str(rng.randrange(10))}]
        row = {"messages": turns}
        if "image" in kinds:
            row["images"] = [str(rng.choice(images)) for kind in kinds if kind == "image"]
        if "audio" in kinds:
            row["audios"] = [str(rng.choice(audios)) for kind in kinds if kind == "audio"]
        rows.append(row)
    return rows


def draw_config(rng: random.Random, checkpoints: Path, folder: Path, steps: int) -> dict:
    """The configuration of a block; its data are written to `folder`."""
    media = rng.choice((0.0, 0.1, 0.3, 0.3, 0.7, 1.0))
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in draw_rows(rng, media, ROWS)))
    pipe, tensor, sequence = rng.choice(DEGREES)
    replicas = RANKS // (pipe * tensor * sequence)
    reduction = rng.choice(({"reduction": "none", "factor": 1}, {"reduction": "pixel_shuffle", "factor": 2}))
    raw = config_dict(
        checkpoints,
        folder,
        encoders={"vision": {"projector": reduction}},
        encoder_parallel={
            "long_short": rng.choice(("off", "auto", 2, 4, 8, 8)),
            "max_sp": rng.choice((1, 2, 4, 8, 8)),
            "zero_stage": rng.choice((1, 2, 2, 2, 2, 3)),
        },
        balance={
            "mode": rng.choice(("auto", "auto", "off")),
            "group_size": rng.choice([n for n in (1, 2, 4) if replicas % n == 0]),
        },
        train={"max_steps": steps, "seed": rng.randrange(1000)},
    )
    raw["omni"]["data"]["train"] = [{"path": str(data)}]
    raw |= {"train_batch_size": rng.choice((4, 8)), "pipeline": {"stages": pipe}}
    raw |= {"tensor_parallel": {"autotp_size": tensor}, "sequence_parallel_size": sequence}
    return raw


def train_block(path: str) -> tuple[list[float], list[float], Tally]:
    """On every rank: losses, norms, and what the plans held."""
    from omni_ds.config.load import load_config
    from omni_ds.engine.launch import assemble
    from omni_ds.engine.step_input import prepare
    from omni_ds.parallel.agreement import agree_on_step

    run = assemble(load_config(path, ()))
    runtime, losses, norms, tally = run.runtime, [], [], Tally()
    for batch in run.batches(0, run.config.omni.train.max_steps):
        failed = agree_on_step(batch.step_plan, sorted({r for r, _ in batch.failed}), runtime.groups.control)
        result = runtime.executor.run(prepare(batch, runtime.rank, failed, runtime.device))
        losses.append(result.loss)
        norms.append(result.grad_norm)
        tally += _look(batch.step_plan)
    return losses, norms, tally


def _look(step) -> Tally:
    shares = [share for replica in step.replicas for window in replica.windows for share in window.shares]
    items = [placed.item for share in shares for placed in share.items]
    busy = {share.rank for share in shares if share.items}
    parts = {(item.row, item.ordinal) for item in items if item.start or item.gang > 1}
    return Tally(
        steps=1,
        without_media=not items,
        half=len({item.encoder for item in items}) == 1,
        away=0 < len(busy) < RANKS,
        split=bool(parts),
        sliced=any(item.gang > 1 for item in items),
    )


def fuzz(steps: int, block: int, seed: int, only: int | None = None, say=lambda text: None) -> Tally:
    """Train `steps` steps in blocks. AssertionError: a loss or norm is not finite, or ranks disagree;
    RankFailure: a rank failed or hung."""
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        checkpoints = Path(name) / "models"
        make_checkpoints(checkpoints, positions=10)
        for number in range(-(-steps // block)):
            rng = random.Random(seed * 100_003 + number)
            if only is not None and number != only:
                continue
            folder = Path(name) / str(number)
            folder.mkdir()
            raw = draw_config(rng, checkpoints, folder, min(block, steps - number * block))
            path, began = write_config(raw, folder / "config.json"), time.perf_counter()
            say(f"block {number}: {describe(raw)}")
            results = run_ranks(train_block, RANKS, str(path), timeout=120 + 4 * block)
            losses, norms, found = results[0]
            assert all(result == results[0] for result in results), f"block {number}: ranks disagree"
            assert all(map(math.isfinite, [*losses, *norms])), f"block {number}: {losses} {norms}"
            tally += found
            say(f"  loss {losses[0]:.3f} - {losses[-1]:.3f}, {time.perf_counter() - began:.1f} s, {found}")
    return tally


def describe(raw: dict) -> str:
    omni, tensor = raw["omni"], raw["tensor_parallel"]["autotp_size"]
    degrees = f"pp {raw['pipeline']['stages']}, tp {tensor}, sp {raw['sequence_parallel_size']}"
    batch = raw["train_batch_size"]
    return f"{degrees}, {omni['encoder_parallel']}, {omni['balance']}, batch {batch}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--block", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this block alone")
    args = parser.parse_args()
    from omni_ds.engine.environment import prepare_imports

    prepare_imports()
    import omni_ds.engine.launch  # noqa: F401  once, before ranks are forked

    began = time.perf_counter()
    print(fuzz(args.steps, args.block, args.seed, args.only, lambda text: print(text, flush=True)))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
