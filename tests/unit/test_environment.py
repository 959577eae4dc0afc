"""What the process environment is given before a run."""

import os

import pytest

from omni_ds.engine.environment import _keep_memory_whole

NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({NEW: "backend:native"}, "backend:native"),
        ({OLD: "backend:native"}, None),
    ],
)
def test_segments_grow_unless_the_user_has_chosen(
    given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (NEW, OLD):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", {**os.environ, **given})
    _keep_memory_whole()
    assert os.environ.get(NEW) == expected
