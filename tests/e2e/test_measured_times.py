"""Measured times move encoder work between actions; losses and norms stay the same bit for bit."""

import json
from pathlib import Path

import pytest
from ranks import run_ranks
from tiny import config_dict, make_checkpoints, write_config

STEPS = 14  # times are measured in steps 4 to 7 and used from step 8 on


def _train(config: str) -> None:
    import run as command
    from omni_ds.config.load import load_config
    from omni_ds.engine.launch import _run

    _run(load_config(config), command.parse_arguments(["--deepspeed_config", config]))


def _metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("zero_stage", [2])
def test_same_result_with_and_without(tmp_path: Path, zero_stage: int) -> None:
    make_checkpoints(tmp_path)
    rows = {}
    for measured in (True, False):
        output = tmp_path / str(measured)
        raw = config_dict(
            tmp_path,
            output,
            encoder_parallel={"measured_times": measured, "zero_stage": zero_stage},
            train={"max_steps": STEPS},
            checkpoint={"every": STEPS},
            export={"at_end": False},
        )
        raw["pipeline"]["stages"] = 2
        run_ranks(_train, 2, str(write_config(raw, tmp_path / f"{measured}.json")), timeout=120)
        rows[measured] = _metrics(output)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows[True]] == [row[key] for row in rows[False]]
    planned = [[row["bubble_fraction"] for row in rows[measured]] for measured in (True, False)]
    assert planned[0][:7] == planned[1][:7]
    assert planned[0][7:] != planned[1][7:], "the measured times were not used"
    index = tmp_path / "True" / "checkpoints" / f"step-{STEPS:08d}" / "index.json"
    (model,) = json.loads(index.read_text())["run"]["times"]["models"]
    assert model["from_step"] == 8
    assert {"F.0", "F.1", "B.0", "B.1", "EF", "EB"} == set(model["coefficients"])
