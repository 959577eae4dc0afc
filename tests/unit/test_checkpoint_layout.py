"""Which checkpoints are kept, found and set aside."""

import json
from pathlib import Path

from omni_ds.checkpoint.layout import FORMAT, INDEX, LATEST, latest_tag, prune, set_aside_after, tag_of


def make(root: Path, *steps: int) -> None:
    for step in steps:
        folder = root / tag_of(step)
        folder.mkdir(parents=True)
        (folder / INDEX).write_text(json.dumps({"format": FORMAT, "step": step, "files": {}}))
        (root / LATEST).write_text(tag_of(step) + "\n")


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_prune_keeps_the_newest_and_clears_killed_saves(tmp_path: Path) -> None:
    make(tmp_path, 100, 200, 300)
    (tmp_path / (tag_of(400) + ".tmp")).mkdir()
    prune(tmp_path, 2)
    assert names(tmp_path) == [tag_of(200), tag_of(300)]
    prune(tmp_path, None)
    assert names(tmp_path) == [tag_of(200), tag_of(300)]


def test_a_shorter_run_in_the_same_folder_keeps_its_own(tmp_path: Path) -> None:
    make(tmp_path, 400, 450, 500)
    moved = set_aside_after(tmp_path, 0)
    assert [path.name for path in moved] == [f"abandoned-{tag_of(step)}" for step in (400, 450, 500)]
    make(tmp_path, 50)
    prune(tmp_path, 3)
    assert latest_tag(tmp_path) == tag_of(50)
    assert len(names(tmp_path)) == 4  # nothing was deleted


def test_resuming_sets_aside_only_later_steps(tmp_path: Path) -> None:
    make(tmp_path, 100, 200, 300)
    assert [path.name for path in set_aside_after(tmp_path, 200)] == [f"abandoned-{tag_of(300)}"]
    make(tmp_path, 300)
    assert set_aside_after(tmp_path, 200)[0].name == f"abandoned-{tag_of(300)}-1"
    assert latest_tag(tmp_path) == tag_of(200)


def test_a_damaged_latest_falls_back_to_an_older_one(tmp_path: Path) -> None:
    make(tmp_path, 1, 2)
    (tmp_path / tag_of(2) / INDEX).write_text("{")
    assert latest_tag(tmp_path) == tag_of(1)
