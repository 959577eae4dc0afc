"""How long the index of a large set takes, when the first step can begin, and what a rank holds of it.

    python benchmarks/index.py [--rows N] [--ranks N] [--whole] [--json PATH]

A JSONL file of N rows (texts and media of the bundled digits, again and again) is written to a temporary
folder. `cold`: from opening the set without an index to the numbers of the first global batch on every rank;
the first block is measured by as many processes as there are cores. Then the other blocks are made: measured
with --whole, else with the numbers of like rows seen before (they hold the same, but the time says nothing).
`warm`: the same start with the whole index there. Ranks are processes that open the set at the same time,
with their tokenizer loaded; where cores are fewer than ranks they wait for each other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from anywhere, without an install

import data.index_build
from data.index import open_dataset
from data.index_layout import Layout
from data.sampler import GlobalBatchSampler
from omni_ds.composition import read_composition
from omni_ds.config.load import load_config

BATCH = 256
ROOT = Path(__file__).resolve().parent.parent
DIGITS = ROOT / "data" / "digits"


def write_rows(path: Path, count: int) -> int:
    """Write the file; how many different rows it repeats."""
    different = []
    for kind in ("written", "spoken", "sum", "text"):
        different += (DIGITS / f"train_{kind}.jsonl").read_text().splitlines()
    with open(path, "w") as file:
        for start in range(0, count, len(different)):
            file.write("\n".join(different[: count - start]) + "\n")
    return len(different)


class Setup:
    """The bundled configuration with the file as its training set."""

    def __init__(self, path: Path):
        os.chdir(ROOT)  # the configuration's paths start there
        train = json.dumps([{"path": str(path), "media_dir": str(DIGITS)}])
        self.config = load_config("ds_configs/omni.json", [f"omni.data.train={train}"])
        self.composition = read_composition(self.config)

    def open(self, *, builder: bool, rolling: bool = True):
        parts, data_config = self.composition, self.config.omni.data
        metas = {meta.name: meta for meta in parts.encoders}
        return open_dataset(
            data_config.train, data_config, parts.text, parts.media, metas, builder=builder, rolling=rolling
        )


def first_step(dataset) -> None:
    sampler = GlobalBatchSampler(dataset.sizes, dataset.weights, BATCH, 1, dataset.growing)
    dataset.metas(sampler.rows(0))


def memory() -> dict[str, float]:
    """MB of this process: all, and without what it shares with others."""
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    size = {name: int(value.split()[0]) / 1024 for name, value in fields.items()}
    return {"resident_mb": size["Rss"], "private_mb": size["Private_Dirty"] + size["Private_Clean"]}


def start_up(setup: Setup, ranks: int) -> dict:
    """A run's start: rank 0 opens and makes, then all open and want the first step."""

    def rank(number: int, opened, results) -> None:
        started = time.perf_counter()
        if not number:
            setup.open(builder=True)
            built = time.perf_counter() - started
            opened.wait()
        else:
            opened.wait()
            built = 0.0
        dataset = setup.open(builder=False)
        first_step(dataset)
        results.put({"seconds": time.perf_counter() - started, "built": built, **memory()})

    context = multiprocessing.get_context("fork")
    opened, results = context.Barrier(ranks), context.Queue()
    processes = [context.Process(target=rank, args=(number, opened, results)) for number in range(ranks)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return {
        "first_step_s": max(each["seconds"] for each in found),
        "index_s": max(each["built"] for each in found),
        "resident_mb": max(each["resident_mb"] for each in found),
        "private_mb": max(each["private_mb"] for each in found),
    }


def finish(setup: Setup, different: int | None) -> float:
    """Make the blocks that are missing; seconds. different: rows after which the file repeats itself."""
    measure, seen = data.index_build.Measurer.measure, {}

    def remembered(self, row: int):
        if row % different not in seen:
            seen[row % different] = measure(self, row % different)
        return replace(seen[row % different], row=row)

    if different is not None:
        data.index_build.Measurer.measure = remembered
    started = time.perf_counter()
    setup.open(builder=True, rolling=False)
    data.index_build.Measurer.measure = measure
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--whole", action="store_true", help="measure every row")
    parser.add_argument("--json", metavar="PATH")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.jsonl"
        different = write_rows(path, arguments.rows)
        setup = Setup(path)
        before = memory()
        cold = start_up(setup, arguments.ranks)
        layout = Layout.of(arguments.rows)
        block_rows = sum(map(len, layout.chunks(0)))
        rest = finish(setup, None if arguments.whole else different)
        warm = start_up(setup, arguments.ranks)
        index_mb = sum(file.stat().st_size for file in path.parent.glob(".omni_cache/*/block-*")) / 2**20
        data_mb = path.stat().st_size / 2**20
    cores = data.index_build.processes_for(arguments.rows)
    report = {
        "rows": arguments.rows,
        "ranks": arguments.ranks,
        "processes": cores,
        "blocks": layout.blocks,
        "block_rows": block_rows,
        "rows_per_s": block_rows / cold["index_s"],
        "rest_s": rest if arguments.whole else None,
        "data_mb": data_mb,
        "index_mb": index_mb,
        "before": before,
        "cold": cold,
        "warm": warm,
    }
    print(f"{arguments.rows:,} rows ({data_mb:.0f} MB) in {layout.blocks} blocks, index {index_mb:.1f} MB")
    print(f"{'start':8}{'first step':>12}{'of it index':>13}{'resident':>11}{'private':>10}   a rank")
    for name, row in (("cold", cold), ("warm", warm)):
        print(
            f"{name:8}{row['first_step_s']:>10.1f} s{row['index_s']:>11.1f} s{row['resident_mb']:>8.0f} MB"
            f"{row['private_mb']:>7.0f} MB"
        )
    print(f"(before opening: {before['resident_mb']:.0f} MB resident)")
    print(f"cold: {block_rows:,} rows measured at {report['rows_per_s']:.0f} rows/s by {cores} processes")
    if arguments.whole:
        print(f"the other rows: {rest:.0f} s")
    print(
        f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}, {arguments.ranks} processes as ranks, batch {BATCH}"
    )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
