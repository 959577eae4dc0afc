"""What training does: a sample learns from its own media, and the export holds what was learned."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e.runs import TRACEBACK, Ranks, checkpoints, config_file, exported, merged, metrics
from ranks import run_command, run_ranks
from tiny import DIGITS

KINDS = ("written", "spoken", "sum", "text")


def sample_rows(each: int, kinds: tuple[str, ...] = KINDS, start: int = 0) -> list[dict[str, Any]]:
    """The first rows of the bundled sets, kinds in turn, with whole paths."""
    read = []
    for kind in kinds:
        lines = (DIGITS / f"train_{kind}.jsonl").read_text().splitlines()[start : start + each]
        read.append([json.loads(line) for line in lines])
    rows = [row for group in zip(*read, strict=True) for row in group]
    for row in rows:
        for column in ("images", "audios"):
            if column in row:
                row[column] = [str(DIGITS / path) for path in row[column]]
    return rows


def write_rows(file: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The section ``omni.data`` that trains on ``rows``, all in one batch."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"train": [{"path": str(file)}]}


def config_of(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> str:
    data = write_rows(folder / "rows.jsonl", rows)
    base = {"train_batch_size": len(rows), "omni": {"data": data, "export": {"at_end": False}}}
    return config_file(folder / "run", **merged(base, changes))


def loss_of_every_sample(config: str) -> dict[int, float]:
    """Row -> summed loss of its targets, from one forward-only step; on the ranks of the last stage."""
    from data.loader import EvalLoader
    from omni_ds.config.load import load_config
    from omni_ds.engine.launch import assemble
    from omni_ds.engine.step_input import prepare

    run = assemble(load_config(config))
    rank = run.runtime.rank
    losses: dict[int, float] = {}
    for batch in EvalLoader(run.dataset, run.config.train_batch_size, run.plan, rank):
        step = prepare(batch, rank, (), run.runtime.device)
        result = run.runtime.executor.run(step)
        for index, scores in result.scores.items():
            samples = step.plan.replica_of(rank).micro_batches[index].samples
            for position, sample in enumerate(samples):
                mine = step.batches[index].sample_of_target == position
                losses[sample.row] = float(scores.loss[mine].double().sum())
    return losses


@pytest.mark.parametrize("stages", [2, pytest.param(1, marks=pytest.mark.full)])
def test_one_image_changes_one_loss(tmp_path: Path, stages: int) -> None:
    """Twelve samples in one packed step; another image in one of them, every other loss equal to the bit."""
    rows = sample_rows(4, ("written", "sum", "text"))
    changed = next(i for i, row in enumerate(rows) if row.get("task") == "sum")
    other = sample_rows(1, ("written",), start=7)[0]["images"]
    losses = []
    for name in ("before", "after"):
        folder = tmp_path / name
        folder.mkdir()
        config = config_of(folder, rows, pipeline={"stages": stages})
        results = run_ranks(loss_of_every_sample, 2, config)
        losses.append({row: loss for result in results for row, loss in result.items()})
        rows[changed] = rows[changed] | {"images": other}
    assert losses[0].keys() == losses[1].keys() == set(range(12))
    differing = [row for row in losses[0] if losses[0][row] != losses[1][row]]
    assert differing == [changed]
    assert abs(losses[0][changed] - losses[1][changed]) > 1e-4


def ask(export: Path, rows: list[dict[str, Any]], folder: Path) -> list[str]:
    """Answers of the exported model to the rows' questions, from a process without this repository."""
    conversations = []
    for row in rows:
        media = {"image": iter(row.get("images", [])), "audio": iter(row.get("audios", []))}
        conversations.append([])
        for message in row["messages"][:-1]:
            content = []
            for piece in re.split(r"(<image>|<audio>)", message["content"]):
                if piece in ("<image>", "<audio>"):
                    content.append({"type": piece[1:-1], "path": next(media[piece[1:-1]])})
                elif piece:
                    content.append({"type": "text", "text": piece})
            conversations[-1].append({"role": message["role"], "content": content})
    (folder / "questions.json").write_text(json.dumps(conversations))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    probe = Path(__file__).with_name("answer_probe.py").read_text()
    arguments = [str(export), str(folder / "questions.json"), str(folder / "answers.json")]
    done = subprocess.run(
        [sys.executable, "-c", probe, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "answers.json").read_text())


def test_overfitted_samples_are_reproduced_by_the_export(tmp_path: Path) -> None:
    """Sixteen samples of four kinds, learned to a loss below 0.01; the export gives their answers."""
    rows = sample_rows(4)
    config = config_of(
        tmp_path,
        rows,
        gradient_clipping=1.0,
        optimizer={"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.0, "eps": 1e-8}},
        omni={
            "encoders": {"vision": {"lr": None}, "audio": {"lr": None}},
            "train": {"max_steps": 160},
            "eval": {"sets": {"same": {"path": str(tmp_path / "rows.jsonl"), "metric": "exact_match"}}},
        },
    )
    status, said = run_command(["--config", config, "--export", str(tmp_path / "model")], timeout=120)
    assert status == 0, said
    report = json.loads((tmp_path / "run/eval.json").read_text())["sets"]["same"]
    assert report["loss"] < 0.01
    assert report["exact_match"] == 1.0 and report["samples"] == 16
    assert ask(tmp_path / "model", rows, tmp_path) == [row["messages"][-1]["content"] for row in rows]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("pipeline.stages=2", "omni.encoder_parallel.zero_stage=3"), id="fp32"),
        pytest.param(("pipeline.stages=2", "bf16.enabled=true"), id="bf16", marks=pytest.mark.full),
        pytest.param(
            ("bf16.enabled=true", "omni.encoder_parallel.zero_stage=3"),
            id="bf16-zero3",
            marks=pytest.mark.full,
        ),
    ],
)
def test_rate_zero_exports_what_was_imported(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """An LLM stored in bf16, encoders in fp32: names, dtypes and bits survive three steps of two ranks."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoints() / "llm", tmp_path / "llm")
    llm = load_file(tmp_path / "llm/model.safetensors")
    llm = {name: tensor.bfloat16() for name, tensor in llm.items()}
    save_file(llm, tmp_path / "llm/model.safetensors", metadata={"format": "pt"})
    zero = {"lr": 0.0, "projector": {"lr": 0.0}}
    config = config_file(
        tmp_path / "run",
        optimizer={"params": {"lr": 0.0}},
        omni={"llm": {"path": str(tmp_path / "llm")}, "encoders": {"vision": zero, "audio": zero}},
    )
    sets = [argument for each in overrides for argument in ("--set", each)]
    Ranks(["--config", config, *sets], 2).wait()
    assert all(row["grad_norm"] > 0 for row in metrics(tmp_path / "run"))
    vision = load_file(checkpoints() / "vision/model.safetensors")
    audio = load_file(checkpoints() / "audio/model.safetensors")
    imported = {f"llm.{name}": tensor for name, tensor in llm.items()}
    imported |= {f"encoders.vision.tower.{name}": tensor for name, tensor in vision.items()}
    imported |= {
        f"encoders.audio.tower.{name.removeprefix('encoder.')}": tensor
        for name, tensor in audio.items()
        if name.startswith("encoder.")
    }
    found = exported(tmp_path / "run/export")
    fresh = {name for name in found if ".projector." in name}
    assert found.keys() - fresh == imported.keys()
    for name, tensor in imported.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].equal(tensor), name


def broken_after_indexing(tmp_path: Path) -> tuple[list[dict[str, Any]], int, str]:
    """Twelve rows whose index is cached, then one of their images is cut: (rows, the broken one, config)."""
    rows = sample_rows(3)
    broken = next(i for i, row in enumerate(rows) if row["task"] == "sum")
    image = tmp_path / "image.png"
    shutil.copy(rows[broken]["images"][0], image)
    rows[broken] = rows[broken] | {"images": [str(image)]}
    config = config_of(tmp_path, rows, pipeline={"stages": 2})
    assert run_command(["--config", config, "--set", "pipeline.stages=1", "--inspect", "1"])[0] == 0
    os.truncate(image, image.stat().st_size // 2)
    return rows, broken, config


def test_failing_medium_leaves_the_loss_exact(tmp_path: Path) -> None:
    """Its sample has no targets and no part in the mean: the same as training on the other eleven."""
    rows, broken, config = broken_after_indexing(tmp_path)
    said = Ranks(["--config", config], 2).wait()
    assert f"row {broken}: " in said
    others = tmp_path / "others"
    others.mkdir()
    rest = rows[:broken] + rows[broken + 1 :]
    status, _ = run_command(["--config", config_of(others, rest)])
    assert status == 0
    for row, expected in zip(metrics(tmp_path / "run"), metrics(others / "run"), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert row["target_tokens"] == expected["target_tokens"]
        assert row["failed_samples"] == row["step"], "one in every step"


def test_too_many_failing_media_stop_the_run(tmp_path: Path) -> None:
    _, _, config = broken_after_indexing(tmp_path)
    ranks = Ranks(["--config", config, "--set", "omni.train.max_steps=20"], 2)
    assert ranks.statuses(timeout=90) == [2, 2]
    said = ranks.text()
    assert said.count("error: ") == 1 and TRACEBACK not in said
    assert "9 of 108 samples" in said and "omni.data.max_skip_fraction 0.01" in said
    assert len(metrics(tmp_path / "run")) == 8, "judged from 100 samples on"
