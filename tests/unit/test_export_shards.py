"""Shards of several writers, their final names, and the folder that appears at once."""

import json

import pytest
import torch
from safetensors import safe_open

from omni_ds.checkpoint.export_shards import ShardWriter, parse_size, place_shards
from omni_ds.checkpoint.export_target import (
    MARKER,
    check_export_target,
    clear_leftovers,
    publish,
    staging_folder,
)
from omni_ds.errors import UserError


def same(name):
    return name


def fp32(name):
    return torch.float32


def read(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def written_by_two(out_dir, tensors, size):
    """Even tensors by one writer, odd ones by another, as two ranks do side by side."""
    writers = [ShardWriter(out_dir, f"rank{rank:05d}", size, fp32) for rank in range(2)]
    for position, (name, tensor) in enumerate(tensors.items()):
        writers[position % 2].add(name, tensor)
    return [writer.close() for writer in writers]


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("1.5 KiB", 1536), (4096, 4096), ("2gib", 2**31)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["five", "5 parsecs", "0GB", "-1GB", ""])
def test_sizes_that_are_none(text):
    with pytest.raises(UserError, match="max_shard_size"):
        parse_size(text)


def test_shards_split_at_the_limit_and_the_index_finds_every_tensor(tmp_path):
    tensors = {f"t{i}": torch.randn(10, 10) for i in range(7)}  # 400 bytes each; writers hold 4 and 3
    tensors["large"] = torch.randn(40, 40)  # larger than a shard: alone in its own
    manifests = written_by_two(tmp_path / "out", tensors, 1000)
    assert [[len(sizes) for _, sizes in manifest] for manifest in manifests] == [[2, 2], [2, 1, 1]]
    folder = staging_folder(tmp_path / "out")
    files = place_shards(folder, manifests, same)
    assert files[:5] == [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 7 * 400 + 6400
    assert set(index["weight_map"]) == set(tensors)
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), tensors[name])


def test_one_shard_has_the_plain_name_and_no_index(tmp_path):
    writer = ShardWriter(tmp_path / "out", "rank00000", "1GB", fp32)
    writer.add("a", torch.ones(3))
    files = place_shards(staging_folder(tmp_path / "out"), [writer.close(), []], same)
    assert files == ["model.safetensors"]
    assert not list(staging_folder(tmp_path / "out").glob("*.json"))


def test_dtype_by_name_integers_stay_and_views_are_copied(tmp_path):
    writer = ShardWriter(
        tmp_path / "out", "r", "1GB", lambda name: torch.bfloat16 if name == "half" else torch.float32
    )
    base = torch.randn(4, 6, dtype=torch.float64)
    writer.add("half", base)
    writer.add("view", base.t())
    writer.add("count", torch.arange(3))
    base.zero_()
    place_shards(staging_folder(tmp_path / "out"), [writer.close()], same)
    found = read(staging_folder(tmp_path / "out"))
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "half": torch.bfloat16,
        "view": torch.float32,
        "count": torch.int64,
    }
    assert torch.equal(found["view"].to(torch.bfloat16), found["half"].t())
    assert found["view"].abs().sum() > 0


def test_renaming_keeps_the_data(tmp_path):
    tensors = {"llm.a": torch.randn(3, 5), "llm.bcd": torch.randn(7), "x": torch.randn(2)}
    manifests = written_by_two(tmp_path / "out", tensors, "1GB")
    place_shards(
        staging_folder(tmp_path / "out"), manifests, lambda name: name.replace("llm.", "language_model.")
    )
    found = read(staging_folder(tmp_path / "out"))
    assert set(found) == {"language_model.a", "language_model.bcd", "x"}
    assert torch.equal(found["language_model.bcd"], tensors["llm.bcd"])
    assert torch.equal(found["language_model.a"], tensors["llm.a"])


def staged(out_dir, names):
    folder = staging_folder(out_dir)
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text(name)


def test_an_earlier_export_is_replaced_whole_and_leftovers_go(tmp_path):
    out_dir = tmp_path / "deep" / "out"
    staged(out_dir, ["a", "b"])
    publish(out_dir)
    staged(out_dir, ["b", "c", "shard of a killed run"])
    clear_leftovers(out_dir, keep={"b", "c"})
    publish(out_dir)
    assert sorted(path.name for path in out_dir.iterdir()) == sorted(["b", "c", MARKER])
    assert [path.name for path in out_dir.parent.iterdir()] == ["out"]


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        ShardWriter(tmp_path, "r", "1GB", fp32)
    out_dir = tmp_path / "out"
    staged(out_dir, ["a"])
    publish(out_dir)
    (out_dir / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt"):
        check_export_target(out_dir)
    assert (out_dir / "notes.txt").read_text() == "mine"


def test_an_empty_folder_is_used(tmp_path):
    out_dir = tmp_path / "out"
    out_dir.mkdir()
    staged(out_dir, ["a"])
    publish(out_dir)
    assert (out_dir / "a").read_text() == "a"


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file of this name"):
        check_export_target(tmp_path / "file")
    with pytest.raises(UserError, match="name another folder"):
        check_export_target(tmp_path / "file" / "below")
    with pytest.raises(UserError, match="name another folder"):
        ShardWriter("/proc/export", "r", "1GB", fp32)
