"""What the executor sends of features and their gradients is what the plan says has to move."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from ranks import run_ranks
from tiny import config_dict, make_checkpoints, write_config
from worker import count_slices

LAYOUTS = {
    "pipeline and tensor": ("pipeline.stages=2", "tensor_parallel.autotp_size=2"),
    "tensor and sequence, in slices": (
        "pipeline.stages=1",
        "tensor_parallel.autotp_size=2",
        "sequence_parallel_size=2",
        "omni.encoder_parallel.long_short=8",
    ),
}


def run_steps(path: str, overrides: tuple[str, ...]) -> list[tuple[int, int, int, int]]:
    """(sent by all ranks, bound of the plan, rows, slices) of each step."""
    from omni_ds.config.load import load_config
    from omni_ds.engine.launch import assemble
    from omni_ds.engine.step_input import prepare
    from omni_ds.plan.balance import feature_bytes_bound, rows_to_move

    run = assemble(load_config(path, overrides))
    runtime, found = run.runtime, []
    for batch in run.batches(0, 2):
        result = runtime.executor.run(prepare(batch, runtime.rank, (), runtime.device))
        least = feature_bytes_bound(batch.step_plan, run.plan.llm.hidden, 4)
        slices = count_slices(batch.step_plan)
        found.append((result.feature_bytes, least, rows_to_move(batch.step_plan), slices))
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_sent_are_the_least(name: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="features-"))
    make_checkpoints(folder)
    path = write_config(config_dict(folder, folder / "run"), folder / "config.json")
    results = run_ranks(run_steps, 4, str(path), LAYOUTS[name], timeout=100)
    assert all(result == results[0] for result in results)
    for sent, least, rows, slices in results[0]:
        assert sent == least and rows > 0 and (slices > 0) == ("long_short" in str(LAYOUTS[name]))
