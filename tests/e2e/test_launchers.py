"""The same losses from torchrun, from deepspeed and from one process alone, as real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.runs import TRACEBACK, config_file, series
from ranks import _free_port
from tiny import ROOT

STEPS = 5
PLAIN = "plain"
BIN = Path(sys.executable).parent


def launch(launcher: str, ranks: int, port: int) -> list[str]:
    """The command line up to run.py's own arguments."""
    if launcher == PLAIN:
        return [sys.executable, "run.py"]
    if launcher == "torchrun":
        return [str(BIN / "torchrun"), f"--nproc_per_node={ranks}", f"--master_port={port}", "run.py"]
    return [str(BIN / "deepspeed"), "--num_accelerators", str(ranks), "--master_port", str(port), "run.py"]


def start(launcher: str, ranks: int, output: Path, *sets: str) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of a whole run in processes of its own."""
    output.parent.mkdir(parents=True, exist_ok=True)
    config = config_file(output, omni={"train": {"max_steps": STEPS}, "export": {"at_end": False}})
    command = [*launch(launcher, ranks, _free_port()), "--deepspeed_config", config]
    command += [argument for each in sets for argument in ("--set", each)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert TRACEBACK not in done.stderr
    assert f"step {STEPS}  loss" in done.stdout
    return series(output, "loss", "grad_norm")


def assert_equal(found: list[tuple], expected: list[tuple]) -> None:
    assert len(found) == len(expected) == STEPS
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-4)


def test_launchers_train_the_same(tmp_path: Path) -> None:
    """deepspeed on two stages, torchrun on two replicas, one process alone."""
    expected = start(PLAIN, 1, tmp_path / "plain")
    assert_equal(start("deepspeed", 2, tmp_path / "deepspeed", "pipeline.stages=2"), expected)
    assert_equal(start("torchrun", 2, tmp_path / "torchrun"), expected)


@pytest.mark.full
@pytest.mark.parametrize("placement", ["colocated", "first_stage"])
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_every_launcher_and_layout(
    tmp_path: Path, launcher: str, ranks: int, stages: int, placement: str
) -> None:
    expected = start(PLAIN, 1, tmp_path / "plain")
    sets = (f"pipeline.stages={stages}", f"omni.encoder_parallel.placement={placement}")
    assert_equal(start(launcher, ranks, tmp_path / "run", *sets), expected)


def test_an_error_ends_every_process(tmp_path: Path) -> None:
    """A mistake that shows after the ranks have met: torchrun reports failure, the message comes once."""
    config = config_file(tmp_path / "run", omni={"data": {"train": str(tmp_path / "absent.jsonl")}})
    command = [*launch("torchrun", 2, _free_port()), "--deepspeed_config", config]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1
    assert "absent.jsonl" in done.stderr
