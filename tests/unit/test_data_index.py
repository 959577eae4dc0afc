"""The index: what is measured, skipped, cached, and that the data served later is what was measured."""

import json
import os

import numpy as np
import pytest

import data.index_build
from data.cache import BoundedCache
from data.errors import MediaError, RowError
from data.index import open_dataset
from data.preprocess import build_preprocess
from omni_ds.config import EncoderConfig
from omni_ds.errors import UserError
from omni_ds.plan.encoder_meta import EncoderMeta
from tests.unit.data_helpers import composition, flac, png, rows_of_all_kinds, settings, source


@pytest.fixture
def folder(tmp_path):
    png(tmp_path / "a.png", 40, 30)
    png(tmp_path / "b.png", 20, 20, 10)
    flac(tmp_path / "a.flac", 8000)
    flac(tmp_path / "b.flac", 5000)
    return tmp_path


def write(folder, rows, name="train.jsonl"):
    (folder / name).write_text("\n".join(map(json.dumps, rows)) + "\n")
    return source(folder / name)


def opened(sources, *, builder=True, text=None, barrier=None, **cfg):
    parts = composition(text)
    sources = sources if isinstance(sources, list) else [sources]
    return open_dataset(sources, settings(**cfg), *parts, builder=builder, barrier=barrier)


def test_measures_are_those_of_the_encoded_samples(folder):
    rows = rows_of_all_kinds()
    dataset = opened(write(folder, rows))
    assert len(dataset) == len(rows) and not dataset.skipped and dataset.source_ranges == ((0, len(rows)),)
    for row, meta in enumerate(dataset.metas(range(len(dataset)))):
        sample = dataset.encode(row)
        assert sample.meta == meta and meta.row == row
        assert len(sample.input_ids) == len(sample.labels) == meta.tokens
        assert (sample.labels >= 0).sum() == meta.target_tokens > 0
        assert [item.ordinal for item in meta.items] == list(range(len(meta.items)))
        for item in meta.items:
            assert (item.segments, item.rows) == dataset.encoder_metas[item.encoder].measure(item.shape)
            ((offset, length),) = item.spans
            placeholder = dataset.text.placeholders[item.encoder].id
            assert length == item.rows and set(sample.input_ids[offset : offset + length]) == {placeholder}
            value = dataset.load_media(row, item.ordinal)
            assert value.shape[1:] == item.shape and value.dtype == np.float32
            assert dataset.blank_media(row, item.ordinal).shape == value.shape
        placeholders = [p.id for p in dataset.text.placeholders.values()]
        assert np.isin(sample.input_ids, placeholders).sum() == sum(item.rows for item in meta.items)
    assert [dataset.meta(row).task for row in (0, 1)] == ["look", "listen"]
    assert dataset.tasks == ("", "listen", "look")


def test_several_sources_are_numbered_through(folder):
    rows = rows_of_all_kinds()
    first, second = write(folder, rows[:2]), write(folder, rows, "more.jsonl")
    second = second.model_copy(update={"max_samples": 3, "weight": 2.0})
    dataset = opened([first, second])
    assert dataset.source_ranges == ((0, 2), (2, 5)) and dataset.sizes == (2, 3)
    assert dataset.weights == (1.0, 2.0)
    assert dataset.where(2) == f"{folder / 'more.jsonl'}:1"
    assert np.array_equal(dataset.encode(0).input_ids, dataset.encode(2).input_ids)


BAD = {
    "image file not found": {"images": ["missing.png"]},
    "more <image> tags than images": {"images": []},
    "longer than max_length": {"images": ["a.png"], "system": "and " * 300},
    "longer than max_tokens_per_micro_batch": {"images": ["a.png"], "system": "and " * 170},
    "image file cannot be read": {"images": ["broken.png"]},
}


def bad_rows():
    base = rows_of_all_kinds()[0]
    return [{**base, **change} for change in BAD.values()]


def test_bad_rows_are_skipped_and_counted(folder):
    (folder / "broken.png").write_bytes(b"not an image")
    bad = write(folder, [*bad_rows(), *rows_of_all_kinds()])
    dataset = opened(bad, max_skip_fraction=0.9, max_length=250, max_tokens_per_micro_batch=150)
    assert dict(dataset.skipped) == dict.fromkeys(BAD, 1)
    assert len(dataset) == len(rows_of_all_kinds()) and dataset.where(0) == f"{folder / 'train.jsonl'}:6"
    assert "1 image file not found" in dataset.describe()


@pytest.mark.parametrize("builder", [True, False])
def test_bad_rows_stop_the_run_when_they_are_many_or_when_asked(folder, builder):
    bad = write(folder, [*rows_of_all_kinds(), *bad_rows()[:2]])
    with pytest.raises(UserError, match=r"2 of 7 rows .*max_skip_fraction 0.01 .*image file not found \(1\)"):
        opened(bad, builder=builder)
    with pytest.raises(UserError, match=r"train.jsonl:6: image file not found: .*missing.png.*on_error"):
        opened(bad, on_error="raise", builder=builder)


def test_nothing_left(folder):
    with pytest.raises(UserError, match="no row of .* can be used"):
        opened(write(folder, bad_rows()[:1]), max_skip_fraction=1.0)
    (folder / "none.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="has no rows"):
        opened(source(folder / "none.jsonl"))


def count_measured(monkeypatch):
    counted = []
    measure = data.index_build.Measurer.measure
    monkeypatch.setattr(
        data.index_build.Measurer, "measure", lambda self, row: counted.append(row) or measure(self, row)
    )
    return counted


def test_the_index_is_cached_until_something_changes(folder, monkeypatch):
    counted = count_measured(monkeypatch)
    data_file = write(folder, rows_of_all_kinds())
    first = opened(data_file)
    assert len(counted) == 5
    again = opened(data_file)
    assert len(counted) == 5 and again.metas(range(5)) == first.metas(range(5))
    assert again.fingerprint == first.fingerprint
    assert opened(data_file, max_length=400).fingerprint == first.fingerprint
    assert len(counted) == 10
    opened(data_file, text={"loss_on": "last_assistant"})
    assert len(counted) == 15
    assert (folder / ".omni_cache" / ".gitignore").read_text() == "*\n"
    changed = opened(write(folder, rows_of_all_kinds()[:4]))
    assert len(counted) == 19 and changed.fingerprint != first.fingerprint


def test_a_damaged_cache_is_made_again(folder):
    data_file = write(folder, rows_of_all_kinds())
    expected = opened(data_file).metas(range(5))
    (cache,) = (folder / ".omni_cache").glob("*/block-00000.safetensors")
    cache.write_bytes(cache.read_bytes()[:100])
    assert opened(data_file).metas(range(5)) == expected


def test_mended_media_are_noticed(folder):
    data_file = write(folder, [*rows_of_all_kinds(), bad_rows()[0]])
    assert len(opened(data_file, max_skip_fraction=0.5)) == 5
    png(folder / "missing.png")
    assert len(opened(data_file, max_skip_fraction=0.5)) == 6


def test_read_only_data_are_indexed_elsewhere(folder, tmp_path_factory, monkeypatch):
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    (folder / ".omni_cache").write_text("in the way")
    data_file = write(folder, rows_of_all_kinds())
    opened(data_file)
    assert list((home / "omni_ds").glob("*/*.safetensors"))
    named = tmp_path_factory.mktemp("named")
    opened(data_file, cache_dir=str(named / "deep"))
    assert list((named / "deep").glob("*/*.safetensors"))


def test_the_builder_builds_before_the_barrier_and_the_others_read_after_it(folder, monkeypatch):
    counted = count_measured(monkeypatch)
    data_file = write(folder, rows_of_all_kinds())
    order = []
    opened(data_file, barrier=lambda: order.append(len(counted)))
    opened(data_file, builder=False, barrier=lambda: order.append(len(counted)))
    assert order == [5, 5] and len(counted) == 5
    with pytest.raises(UserError):  # the barrier is passed when building fails, too
        opened(write(folder, bad_rows()), barrier=lambda: order.append("passed"), on_error="raise")
    assert order[-1] == "passed"
    with pytest.raises(UserError, match="image file not found"):  # and the others hear why
        opened(source(folder / "train.jsonl"), builder=False, on_error="raise")


def test_processes_give_the_same_index(folder, monkeypatch):
    rows = [*rows_of_all_kinds(), bad_rows()[0]] * 60
    alone = opened(write(folder, rows), max_skip_fraction=0.5)
    monkeypatch.setattr(data.index_build, "_SMALL", 10)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    together = opened(write(folder, rows, "again.jsonl"), max_skip_fraction=0.5)
    assert together.metas(range(300)) == alone.metas(range(300)) and together.skipped == alone.skipped


def test_data_that_change_under_a_run_are_noticed(folder):
    rows = rows_of_all_kinds()
    data_file = write(folder, rows)
    dataset = opened(data_file)
    other = json.dumps(rows[4])
    changed = other.replace("seven", "s3v3n")
    assert len(changed) == len(other)
    content = (folder / "train.jsonl").read_text().replace(other, changed)
    (folder / "train.jsonl").write_text(content)
    with pytest.raises(RowError, match="has changed since it was indexed"):
        dataset.encode(4)
    dataset.encode(0)


def test_media_that_break_under_a_run_are_media_errors(folder):
    dataset = opened(write(folder, rows_of_all_kinds()))
    (folder / "a.png").write_bytes((folder / "a.png").read_bytes()[:80])
    with pytest.raises(MediaError, match="train.jsonl:1"):
        dataset.load_media(0, 0)
    png(folder / "a.png", 9, 9)
    assert dataset.load_media(0, 0).shape == (3, 28, 28)


def test_geometry_that_does_not_fit_is_a_skip(folder):
    text, media, metas = composition(None)
    section = EncoderConfig(
        config={}, modality="image", projector={"reduction": "pixel_shuffle", "factor": 2}
    )
    config = {"model_type": "siglip_vision_model", "hidden_size": 8, "num_attention_heads": 2,
              "intermediate_size": 8, "num_hidden_layers": 1, "image_size": 28, "patch_size": 7}  # fmt: skip
    metas = metas | {"vision": EncoderMeta.from_config("vision", section, config, 16)}
    media = media | {"vision": build_preprocess("vision", section, {"image_size": 21})}
    data_file = write(folder, [rows_of_all_kinds()[0]])
    with pytest.raises(UserError, match="image does not fit its encoder"):
        open_dataset([data_file], settings(), text, media, metas, builder=True)


def test_cached_media_are_those_of_a_fresh_data_set(folder):
    data_file = write(folder, rows_of_all_kinds())
    dataset, fresh = opened(data_file), opened(data_file)
    items = [item for row in range(5) for item in dataset.meta(row).items]
    for item in [*items, *reversed(items)]:
        value = dataset.load_media(item.row, item.ordinal)
        fresh._make_caches()
        assert np.array_equal(value, fresh.load_media(item.row, item.ordinal))
    assert len(dataset._arrays) == 4  # two images, two clips


def test_the_cache_is_bounded():
    cache, made = BoundedCache(10), []
    for key in (1, 2, 3, 1, 4, 2):
        assert cache.get(key, lambda key=key: made.append(key) or key, lambda value: 3) == key
    assert made == [1, 2, 3, 4, 2] and len(cache) == 3
    assert cache.get("large", lambda: "x", lambda value: 11) == "x" and len(cache) == 3
