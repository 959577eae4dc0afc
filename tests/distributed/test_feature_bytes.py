"""What the executor sends of features and their gradients is what the plan says has to move."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from families import make_model, model_config, rows_of
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


LEVELS = ("pp4", ("pipeline.stages=4",)), ("pp2tp2", LAYOUTS["pipeline and tensor"])


def run_steps(path: str, overrides: tuple[str, ...]) -> list[tuple[int, int, int, int]]:
    """(sent by all ranks, bound of the plan, rows, slices) of each step; all messages are as long as
    planned."""
    from omni_ds.config.load import load_config
    from omni_ds.engine.launch import assemble
    from omni_ds.engine.step_input import prepare
    from omni_ds.plan.actions import SENDS
    from omni_ds.plan.balance import feature_bytes_bound, rows_to_move
    from omni_ds.plan.predict import message_rows

    run = assemble(load_config(path, overrides))
    runtime, found = run.runtime, []
    for batch in run.batches(0, 2):
        result = runtime.executor.run(prepare(batch, runtime.rank, (), runtime.device))
        rows = message_rows(run.plan, batch.step_plan)
        sends = [a for a in batch.step_plan.actions(runtime.rank) if a.kind in SENDS]
        planned = sum(rows(runtime.rank, action) for action in sends)
        assert result.bytes_sent == planned * run.plan.llm.hidden * 4
        least = feature_bytes_bound(batch.step_plan, run.plan.row_width, 4)
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


@pytest.mark.parametrize(("name", "overrides"), LEVELS, ids=[name for name, _ in LEVELS])
def test_levels_travel_with_hidden_states_once(name: str, overrides: tuple[str, ...]) -> None:
    """Three levels: with four stages of a layer each, three, two and one arrive at the later ones."""
    folder = Path(tempfile.mkdtemp(prefix="levels-"))
    model, rows = make_model("qwen3_vl", folder / "model"), rows_of("qwen3_vl", folder / "rows")
    path = write_config(model_config(model, rows, folder / "run"), folder / "config.json")
    results = run_ranks(run_steps, 4, str(path), overrides, timeout=100)
    assert all(result == results[0] for result in results)
    assert all(sent == least and moved > 0 for sent, least, moved, _ in results[0])
