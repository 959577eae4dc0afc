"""Files and folders that rows are read from."""

import json
import pickle
from pathlib import Path

import datasets
import numpy as np
import pytest

from data.errors import RowError
from data.media import read_header
from data.rows import RowReader
from data.sources import open_source
from omni_ds.errors import UserError
from tests.unit.data_helpers import flac, png

ROWS = [{"text": f"row {number}"} for number in range(5)]


@pytest.fixture(autouse=True)
def own_caches(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("hf")))
    datasets.disable_progress_bars()


def texts(source):
    return [source[i]["text"] for i in range(len(source))]


def write(folder, kind, rows=ROWS):
    path = folder / f"train.{kind}"
    if kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows))
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif kind == "folder":
        path = folder / "saved"
        datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(path)
    return path


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet", "folder"])
def test_kinds(kind, tmp_path):
    source = open_source(str(write(tmp_path, kind)))
    assert texts(source) == [row["text"] for row in ROWS]
    again = pickle.loads(pickle.dumps(source))
    assert texts(again) == texts(source)
    assert source.local and source.folder.is_relative_to(tmp_path)


def test_a_folder_is_looked_through_for_the_split(tmp_path):
    write(tmp_path, "jsonl")
    datasets.Dataset.from_list(ROWS[:2]).to_parquet(tmp_path / "test-00000-of-00001.parquet")
    assert len(open_source(str(tmp_path))) == 5
    assert len(open_source(str(tmp_path), split="test")) == 2


def test_arrow_files(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert texts(open_source(str(next((tmp_path / "saved").glob("*.arrow"))))) == texts(
        open_source(str(tmp_path / "saved"))
    )


def test_lines_are_numbered_as_an_editor_does(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "\\u2028 b"}\n{broken\n')
    source = open_source(str(path))
    assert len(source) == 3 and source[1]["text"] == "\u2028 b"
    assert source.location(1) == f"{path}:3"
    with pytest.raises(RowError, match="not valid JSON"):
        source[2]


def test_lines_in_a_json_file(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert texts(open_source(str(path))) == ["a", "b"]


def test_image_and_audio_features_stay_undecoded(tmp_path):
    image, clip = png(tmp_path / "a.png", 20, 30), flac(tmp_path / "a.flac", 4000, 8000)
    stored = {"bytes": Path(clip).read_bytes(), "path": None}
    dataset = datasets.Dataset.from_list([{"images": [image], "audios": stored, "text": "<image><audio>"}])
    dataset = dataset.cast_column("images", datasets.List(datasets.Image()))
    dataset = dataset.cast_column("audios", datasets.Audio())
    dataset.to_parquet(tmp_path / "data.parquet")
    source = open_source(str(tmp_path / "data.parquet"))
    sample = RowReader(("image", "audio"), tmp_path).read(source[0])
    headers = [read_header(ref) for ref in sample.media]
    assert (headers[0].height, headers[0].width) == (20, 30)
    assert (headers[1].samples, headers[1].sampling_rate) == (4000, 8000)


def test_fingerprint_follows_the_file(tmp_path):
    path = write(tmp_path, "jsonl")
    before = open_source(str(path)).fingerprint
    assert open_source(str(path)).fingerprint == before
    path.write_text(path.read_text() + "\n" + json.dumps(ROWS[0]))
    assert open_source(str(path)).fingerprint != before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "does not exist"),
        ("./nowhere", None, "does not exist"),
        ("a.jsonl", "", "the file is empty"),
        ("a.csv", "x", "data files are"),
        ("a.json", "[1, 2", "not valid JSON"),
        ("a.json", '{"rows": []}\nx', "not valid JSON"),
        ("a.json", '{"rows":\n []}', "an array of rows"),
        ("a.parquet", "no parquet", "not a readable parquet file"),
        ("org/no-such-set", None, "cannot be loaded as a data set"),
    ],
)
def test_what_cannot_be_read(name, content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        open_source(name)


def test_an_empty_folder_and_a_missing_split(tmp_path):
    with pytest.raises(UserError, match="is empty"):
        open_source(str(tmp_path))
    with pytest.raises(UserError, match="no split 'test'"):
        open_source(str(write(tmp_path, "folder")), split="test")


def test_json_lines_are_not_held_in_memory(tmp_path):
    source = open_source(str(write(tmp_path, "jsonl")))
    assert not any(isinstance(value, list) for value in vars(source).values())
    assert sum(value.nbytes for value in vars(source).values() if isinstance(value, np.ndarray)) == 16 * len(
        ROWS
    )
