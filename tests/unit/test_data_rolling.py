"""Indexes in blocks that are made while they are read: same numbers, same order, whoever dies."""

import json
import multiprocessing
import os
import signal
import time

import pytest

import data.index_build
import data.index_layout
import data.source_index
from data.index import open_dataset
from data.index_layout import Layout, block_name
from data.loader import StepLoader
from data.sampler import GlobalBatchSampler
from data.source_index import SourceIndex
from omni_ds.errors import UserError
from tests.unit.data_helpers import composition, flac, png, rows_of_all_kinds, settings, source
from tests.unit.test_data_loader import make_plan

ROWS = 100


@pytest.fixture
def blocks(monkeypatch):
    monkeypatch.setattr(data.index_layout, "BLOCK_ROWS", 20)
    monkeypatch.setattr(data.index_layout, "CHUNK", 4)


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    png(folder / "a.png", 40, 30)
    png(folder / "b.png", 20, 20, 10)
    flac(folder / "a.flac", 8000)
    flac(folder / "b.flac", 5000)
    return folder


@pytest.fixture
def data_file(media, tmp_path):
    kinds = rows_of_all_kinds()
    rows = [{**kinds[i % 5], "task": f"row {i}"} for i in range(ROWS)]
    for i in (3, 47):
        rows[i]["messages"] = [{"role": "nobody", "content": ""}]
    return written(tmp_path / "train.jsonl", rows, media)


def written(path, rows, media):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return source(path, media_dir=str(media))


def opened(sources, *, builder=True, text=None, **options):
    sources = sources if isinstance(sources, list) else [sources]
    limits = {"max_skip_fraction": 0.05} | options.pop("limits", {})
    return open_dataset(sources, settings(**limits), *composition(text), builder=builder, **options)


def sampler(dataset, batch=8):
    return GlobalBatchSampler(dataset.sizes, dataset.weights, batch, 3, dataset.growing)


def folder_of(data_file, edition=""):
    from pathlib import Path

    (folder,) = (Path(data_file.path).parent / ".omni_cache").glob(f"*{edition}/")
    return folder


def log_measures(monkeypatch, path, before=lambda row: None):
    """Write down each measured row, from any process."""
    measure = data.index_build.Measurer.measure

    def logged(self, row):
        before(row)
        with open(path, "a") as file:
            file.write(f"{row}\n")
        return measure(self, row)

    monkeypatch.setattr(data.index_build.Measurer, "measure", logged)
    return lambda: list(map(int, path.read_text().split())) if path.exists() else []


def numbers(meta):
    return meta.task, meta.tokens, meta.target_tokens, [(i.shape, i.spans, i.rows) for i in meta.items]


def test_blocks_hold_every_row_once_and_across_the_file():
    for rows in (1, 63, 64, 32767, 32768, 1_000_003, 5 * 10**6):
        layout = Layout.of(rows)
        sizes = [sum(map(len, layout.chunks(block))) for block in range(layout.blocks)]
        assert sum(sizes) == rows and layout.blocks <= data.index_layout.MAX_BLOCKS
        assert max(sizes) - min(sizes) <= data.index_layout.CHUNK
        assert (layout.blocks == 1) == (rows < 2 * data.index_layout.BLOCK_ROWS)
    first, second = (Layout.of(200_000).chunks(block) for block in (0, 1))
    assert first[0] == range(64) and second[0] == range(64, 128) and first[-1].stop > 199_000


def test_blocks_have_the_numbers_of_the_whole(data_file, monkeypatch):
    whole = opened(data_file)
    monkeypatch.setattr(data.index_layout, "BLOCK_ROWS", 20)
    monkeypatch.setattr(data.index_layout, "CHUNK", 4)
    blocks = opened(data_file)
    assert len(blocks) == len(whole) == ROWS - 2 and blocks.skipped == whole.skipped
    assert blocks.tasks == whole.tasks and blocks.growing is None
    ours = sorted(numbers(meta) for meta in blocks.metas(range(len(blocks))))
    assert ours == sorted(numbers(meta) for meta in whole.metas(range(len(whole))))
    for row in (0, 30, 97):
        assert blocks.encode(row).meta == blocks.meta(row)
        assert blocks.where(row).endswith(f":{int(blocks.meta(row).task[4:]) + 1}")


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0)])
def test_the_order_is_the_same_however_much_is_known(
    data_file, media, tmp_path, monkeypatch, blocks, weights
):
    few = written(tmp_path / "few.jsonl", rows_of_all_kinds() * 5, media)
    sets = [each.model_copy(update={"weight": w}) for each, w in zip((data_file, few), weights, strict=True)]
    log_measures(monkeypatch, tmp_path / "log", lambda row: time.sleep(0.01))
    cold = opened(sets, rolling=True)
    assert len(cold._indexes[0].known) < 5 and cold.sizes == (ROWS, 25) and len(cold) == ROWS + 25
    ranks = [opened(sets, builder=False, rolling=True) for _ in range(2)]
    steps = [sampler(cold).rows(step) for step in range(45)]
    metas = [cold.metas(rows) for rows in steps]
    assert all(len(set(rows)) == 8 for rows in steps)
    if weights == (1.0, 1.0):
        drawn = [row for rows in steps for row in rows]
        for epoch in range(2):
            assert len(set(drawn[epoch * 123 : (epoch + 1) * 123])) == 123
        assert all(sum(row >= ROWS for row in drawn[i : i + 24]) > 0 for i in range(0, 120, 24))
    monkeypatch.undo()
    monkeypatch.setattr(data.index_layout, "BLOCK_ROWS", 20)
    monkeypatch.setattr(data.index_layout, "CHUNK", 4)
    warm = opened(sets, rolling=True)
    assert warm.fingerprint == cold.fingerprint == ranks[0].fingerprint
    for dataset in (warm, *ranks):
        resumed = sampler(dataset)
        for step in (44, 20, *range(45)):
            assert resumed.rows(step) == steps[step] and dataset.metas(steps[step]) == metas[step]


def test_a_killed_maker_leaves_its_blocks_and_no_process(data_file, tmp_path, monkeypatch, blocks):
    log = log_measures(monkeypatch, tmp_path / "log", lambda row: time.sleep(0.02))
    pids = []
    make = data.index.make_in_background
    monkeypatch.setattr(data.index, "make_in_background", lambda *a, **k: pids.append(make(*a, **k)))
    opened(data_file, rolling=True)
    os.kill(pids[0], signal.SIGKILL)
    os.waitpid(pids[0], 0)
    time.sleep(0.2)  # the kernel ends its workers
    measured = log()
    folder = folder_of(data_file)
    first = (folder / block_name(0)).stat().st_mtime_ns
    time.sleep(0.2)
    assert len(log()) == len(measured) < ROWS and not (folder / block_name(4)).exists()
    (folder / block_name(1)).write_bytes(b"torn")
    dataset = opened(data_file)
    assert len(dataset) == ROWS - 2 and (folder / block_name(0)).stat().st_mtime_ns == first
    assert not set(log()[len(measured) :]) & set(range(4)) and not list(folder.glob("*.part"))


def test_the_maker_ends_with_the_process_that_began_it(data_file, tmp_path, monkeypatch, blocks):
    log = log_measures(monkeypatch, tmp_path / "log", lambda row: time.sleep(0.02))

    def run():
        opened(data_file, rolling=True)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    time.sleep(0.2)
    measured = len(log())
    time.sleep(0.2)
    assert process.exitcode == 0 and measured == len(log()) < ROWS


def test_runs_at_the_same_time_make_one_index(data_file, tmp_path, monkeypatch, blocks):
    log = log_measures(monkeypatch, tmp_path / "log", lambda row: time.sleep(0.005))

    def run(results):
        results.put(len(opened(data_file)))

    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=run, args=(results,)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [ROWS - 2] * 3
    assert sorted(log()) == list(range(ROWS))
    for process in processes:
        process.join()


def test_a_finished_index_is_read_from_a_folder_that_cannot_be_written(
    data_file, tmp_path, monkeypatch, blocks
):
    expected = opened(data_file).metas(range(ROWS - 2))
    log = log_measures(monkeypatch, tmp_path / "log")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert opened(data_file).metas(range(ROWS - 2)) == expected and not log()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert opened(data_file, text={"loss_on": "all"}, rolling=True).growing is not None  # in memory
    assert len(log()) == ROWS


def test_a_changed_template_makes_another_index(data_file, tmp_path, monkeypatch, blocks):
    first = opened(data_file, rolling=True)
    template = composition()[0].chat_template
    log = log_measures(monkeypatch, tmp_path / "log")
    changed = opened(data_file, text={"chat_template": template.replace("<|im_end|>", "<|im_end|> .")})
    assert len(log()) == ROWS and changed.fingerprint != first.fingerprint


def test_mended_media_make_another_edition(media, tmp_path, blocks):
    rows = rows_of_all_kinds() * 20
    rows[99] = {**rows[0], "images": [str(tmp_path / "late.png")]}
    data_file = written(tmp_path / "train.jsonl", rows, media)
    before = opened(data_file, rolling=True)
    assert len(opened(data_file)) == 99
    png(tmp_path / "late.png")
    after = opened(data_file, rolling=True)
    assert after.fingerprint != before.fingerprint and folder_of(data_file, ".1").is_dir()
    assert opened(data_file, builder=False).skipped == {}


def test_too_many_skips_stop_when_they_are_found(media, tmp_path, blocks):
    rows = rows_of_all_kinds() * 20
    rows[95:] = [{"messages": []}] * 5
    data_file = written(tmp_path / "train.jsonl", rows, media)
    dataset = opened(data_file, rolling=True, limits={"max_skip_fraction": 0.02})
    with pytest.raises(UserError, match=r"of 100 rows cannot be used, more than .*no messages"):
        for step in range(20):
            sampler(dataset).rows(step)
    strict = {"on_error": "raise", "max_length": 300}
    with pytest.raises(UserError, match=r"train.jsonl:9\d: no messages; omni.data.on_error"):
        opened(data_file, limits=strict)
    with pytest.raises(UserError, match=r"train.jsonl:9\d: no messages"):
        opened(data_file, builder=False, rolling=True, limits=strict)


def test_who_waits_for_nobody_hears_why(tmp_path, monkeypatch):
    monkeypatch.setattr(data.source_index, "STALLED", 0.3)
    index = SourceIndex("set", Layout(100, 5), tmp_path)
    with pytest.raises(UserError, match=r"set has not grown .*0 of 100 rows.*rank 0"):
        index.stop(0)
    (tmp_path / "failed").write_text("out of space")
    with pytest.raises(UserError, match="out of space"):
        index.stop(0)


def test_loader_processes_wait_for_blocks_and_pass_on_what_went_wrong(media, tmp_path, monkeypatch, blocks):
    data_file = written(tmp_path / "train.jsonl", rows_of_all_kinds() * 20, media)
    log_measures(monkeypatch, tmp_path / "log", lambda row: time.sleep(0.01))
    cold = opened(data_file, rolling=True)
    plan = make_plan(cold)
    wanted = [sampler(opened(data_file, builder=False, rolling=True)).rows(step) for step in range(12)]
    for workers in (0, 1):
        fresh = opened(data_file, builder=False, rolling=True)
        loader = StepLoader(fresh, sampler(fresh), plan, 0, 0, 12, num_workers=workers)
        found = [
            sorted(placed.row for micro_batch in replica.micro_batches for placed in micro_batch.samples)
            for batch in loader
            for replica in (batch.step_plan.replica_of(0),)
        ]
        assert found == [sorted(rows) for rows in wanted]
    monkeypatch.setattr(data.source_index, "STALLED", 0.3)
    alone = SourceIndex("set", Layout(100, 5), tmp_path)
    cold.growing[0].stop = alone.stop
    with pytest.raises(UserError, match="has not grown"):
        next(iter(StepLoader(cold, sampler(cold), plan, 0, 0, 1, num_workers=1)))
