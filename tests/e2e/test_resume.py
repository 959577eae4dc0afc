"""A killed run that is resumed goes on bit for bit as if nothing had happened.

Every run is `run.py` on forked ranks, killed from outside with SIGKILL.
"""

import functools
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from e2e.runs import TRACEBACK, Ranks, config_file, exported, metrics, series
from ranks import RankFailure, run_command

from omni_ds.checkpoint.layout import INDEX, latest_tag

STEPS = 6
WATCHED = ("loss", "grad_norm", "lr", "samples", "target_tokens")
RUN = {
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": "auto"},
    },
    "omni": {"train": {"max_steps": STEPS}, "checkpoint": {"every": 2}},
}


def command(output: Path, *more: str, **changes) -> list[str]:
    return ["--config", config_file(output, **(RUN | changes)), *more]


def layout(stages: int, zero: int, *more: str) -> tuple[str, ...]:
    keys = (f"pipeline.stages={stages}", f"omni.encoder_parallel.zero_stage={zero}", *more)
    return tuple(argument for key in keys for argument in ("--set", key))


@functools.cache
def uninterrupted(*arguments: str) -> Path:
    """Output of a run of two ranks that nothing disturbs."""
    output = Path(tempfile.mkdtemp(prefix="uninterrupted-")) / "run"
    Ranks(command(output, *arguments), 2).wait()
    return output


def assert_same_bits(output: Path, expected: Path) -> None:
    assert series(output, *WATCHED) == series(expected, *WATCHED)
    assert len(metrics(output)) == STEPS
    ours, theirs = exported(output / "export"), exported(expected / "export")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not ours[name].equal(theirs[name])] == []


PP2_ZERO3 = layout(2, 3)
VARIANTS = [
    pytest.param(PP2_ZERO3, id="zero3"),
    pytest.param(layout(2, 1), id="zero1", marks=pytest.mark.full),
    pytest.param(layout(2, 2), id="zero2", marks=pytest.mark.full),
    pytest.param(layout(1, 2), id="dp2-zero2", marks=pytest.mark.full),
    pytest.param(layout(2, 2, "bf16.enabled=true"), id="bf16", marks=pytest.mark.full),
    pytest.param(layout(2, 3, "bf16.enabled=true"), id="bf16-zero3", marks=pytest.mark.full),
    pytest.param(layout(2, 2, "omni.data.num_workers=2"), id="loader-workers", marks=pytest.mark.full),
]


@pytest.mark.parametrize("arguments", VARIANTS)
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    expected = uninterrupted(*arguments)
    output = tmp_path / "run"
    Ranks(command(output, *arguments), 2).kill_after_step(output, 3)
    assert not (output / "export").exists()
    assert latest_tag(output / "checkpoints") in ("step-00000002", "step-00000004")
    said = Ranks(command(output, *arguments, "--resume"), 2).wait()
    assert "resumed from" in said
    assert_same_bits(output, expected)


TP2 = layout(1, 2, "tensor_parallel.autotp_size=2")


@pytest.mark.parametrize(
    ("written", "resumed"),
    [
        pytest.param(PP2_ZERO3, layout(1, 1), id="pp2-dp2"),
        pytest.param(TP2, PP2_ZERO3, id="tp2-pp2"),
        pytest.param(PP2_ZERO3, TP2, id="pp2-tp2", marks=pytest.mark.full),
    ],
)
def test_resumed_in_another_layout(
    tmp_path: Path, written: tuple[str, ...], resumed: tuple[str, ...]
) -> None:
    expected, output = uninterrupted(*written), tmp_path / "run"
    shutil.copytree(expected / "checkpoints/step-00000002", output / "checkpoints/step-00000002")
    tag = "step-00000002"
    Ranks(command(output, *resumed, "--resume", tag), 2).wait()
    rows = metrics(output)
    assert [row["step"] for row in rows] == [3, 4, 5, 6]
    for row, other in zip(rows, metrics(expected)[2:], strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    ours, theirs = exported(output / "export"), exported(expected / "export")
    assert ours.keys() == theirs.keys()
    assert max((ours[name] - theirs[name]).abs().max().item() for name in theirs) < 1e-5


def test_killed_while_saving(tmp_path: Path) -> None:
    """The second checkpoint is cut off after its first file: the first one is taken."""
    output = tmp_path / "run"
    arguments = command(output)

    def die_at_second_save() -> None:
        from omni_ds.checkpoint import state

        write, calls = state.save_file, []

        def save_file(*args) -> None:
            calls.append(write(*args))
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        state.save_file = save_file

    with pytest.raises(RankFailure, match="exited with -9"):
        Ranks(arguments, 1, before=die_at_second_save).wait()
    folder = output / "checkpoints"
    assert (folder / "step-00000004.tmp").is_dir()
    assert latest_tag(folder) == "step-00000002"
    status, said = run_command([*arguments, "--resume", "--set", "omni.checkpoint.keep_last=2"])
    assert status == 0, said
    assert f"resumed from {folder}/step-00000002" in said
    assert [step for (step,) in series(output)] == [1, 2, 3, 4, 5, 6]
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == ["latest", "step-00000004", "step-00000006"], "keep_last 2, and nothing unfinished"


def test_damaged_checkpoints_are_not_taken(tmp_path: Path) -> None:
    output = tmp_path / "run"
    folder = output / "checkpoints"
    shutil.copytree(uninterrupted(*PP2_ZERO3) / "checkpoints", folder)
    assert latest_tag(folder) == "step-00000006"
    cut = folder / "step-00000006/llm-00001.safetensors"
    os.truncate(cut, cut.stat().st_size - 1)
    assert latest_tag(folder) == "step-00000004"
    (folder / "step-00000004" / INDEX).write_text('{"format"')
    assert latest_tag(folder) == "step-00000002"
    arguments = command(output, "--resume")
    status, said = run_command([*arguments, "step-00000006"])
    assert status == 2 and TRACEBACK not in said
    assert "llm-00001.safetensors has" in said
    shutil.rmtree(folder / "step-00000002")
    assert latest_tag(folder) is None
    status, said = run_command(arguments)
    assert status == 2 and "no complete checkpoint" in said


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param("train_batch_size=8", "train_batch_size", id="batch size"),
        pytest.param("omni.train.seed=8", "seed", id="seed", marks=pytest.mark.full),
        pytest.param("omni.data.loss_on=all", "other data", id="targets", marks=pytest.mark.full),
        pytest.param("omni.encoders.audio.projector.hidden_size=24", "does not fit the model", id="model"),
        pytest.param("omni.train.max_steps=4", "max_steps", id="fewer steps", marks=pytest.mark.full),
    ],
)
def test_refused_with_another_run(tmp_path: Path, changed: str, message: str) -> None:
    output = tmp_path / "run"
    shutil.copytree(uninterrupted(*PP2_ZERO3), output, ignore=shutil.ignore_patterns("export"))
    before = (output / "metrics.jsonl").read_text()
    status, said = run_command([*command(output), "--resume", "--set", changed])
    assert status == 2 and TRACEBACK not in said, said
    assert message in said.split("error: ")[1]
    assert (output / "metrics.jsonl").read_text() == before, "a refused run leaves what is there"
