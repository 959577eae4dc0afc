"""Bad input: one clear message, exit status 2, no traceback, no hang; or a counted skip.

Every case is a command line. Its message must name what is wrong; the words checked here are those a user
needs to find the place.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e.runs import TRACEBACK, Ranks, checkpoints, config_file, merged, metrics, raw_config, write_config
from ranks import run_command
from tiny import DIGITS

IMAGE = str(DIGITS / "images/train/3_0315_2.png")
AUDIO = str(next((DIGITS / "audio/train").iterdir()))
Case = Callable[[Path], list[str]]
CASES: dict[str, tuple[Case, tuple[str, ...]]] = {}


def case(name: str, *words: str):
    """Registers a command under ``name``; its message must hold every one of ``words``."""

    def register(make: Case) -> Case:
        CASES[name] = (make, words)
        return make

    return register


def command(folder: Path, *sets: str, **changes: Any) -> list[str]:
    changes = merged({"omni": {"train": {"max_steps": 1}, "export": {"at_end": False}}}, changes)
    overrides = [argument for each in sets for argument in ("--set", each)]
    return ["--config", config_file(folder / "run", **changes), *overrides]


def setting(name: str, *words: str, sets: tuple[str, ...] = (), **changes: Any) -> None:
    CASES[name] = (lambda folder: command(folder, *sets, **changes), words)


def question(text: str = "<image>Which digit?", **columns: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "3"}]
    return {"messages": messages} | columns


def good(count: int) -> list[dict[str, Any]]:
    return [question(images=[IMAGE])] * count


def with_rows(folder: Path, rows: list[Any], *sets: str, **data: Any) -> list[str]:
    file = folder / "rows.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return command(folder, *sets, omni={"data": {"train": [{"path": str(file)}]} | data})


def rows_case(name: str, row: Any, *words: str) -> None:
    CASES[name] = (lambda folder: with_rows(folder, [row] * 4), words)


# Configuration.
setting("bad key", "omni.train.max_stepz", "max_steps", sets=("omni.train.max_stepz=3",))
setting("wrong type", "train_batch_size", "many", train_batch_size="many")
setting("key of another trainer", "per_device_train_batch_size", sets=("per_device_train_batch_size=8",))
setting("degrees that do not divide", "pipeline", "1", sets=("pipeline.stages=2",))
setting("negative learning rate", "lr", sets=("omni.llm.lr=-1",))
setting("unknown optimizer", "optimizer", "AdamZ", sets=("optimizer.type=AdamZ",))
setting("no training length", "max_steps", sets=("omni.train.max_steps=null",))
setting(
    "nothing to learn",
    "nothing to learn",
    omni={
        "llm": {"freeze": True},
        "encoders": {name: {"freeze": True, "projector": {"freeze": True}} for name in ("vision", "audio")},
    },
)


@case("malformed JSON", "config.json", "line 1")
def _(folder: Path) -> list[str]:
    (folder / "config.json").write_text('{"train_batch_size": 8,')
    return ["--config", str(folder / "config.json")]


@case("no configuration file", "absent.json")
def _(folder: Path) -> list[str]:
    return ["--config", str(folder / "absent.json")]


@case("configuration is a folder", "error: ")
def _(folder: Path) -> list[str]:
    return ["--config", str(folder)]


@case("override without a value", "--set", "omni.train.max_steps")
def _(folder: Path) -> list[str]:
    return command(folder, "omni.train.max_steps")


# Checkpoints to start from.
setting("geometry", "4 x 4 patch grid", "pixel_shuffle 3", sets=("omni.encoders.vision.projector.factor=3",))
setting("no checkpoint folder", "/nowhere/at/all", sets=("omni.llm.path=/nowhere/at/all",))
setting("wrong modality", "omni.encoders.vision", "image", sets=("omni.encoders.vision.modality=audio",))
setting(
    "LLM as encoder",
    "omni.encoders.vision",
    "qwen3",
    sets=(f"omni.encoders.vision.path={checkpoints()}/llm",),
)
setting("more stages than layers", "pipeline", sets=("pipeline.stages=8",))


def without(folder: Path, *names: str) -> Path:
    """A copy of the LLM's checkpoint that lacks some files."""
    copy = folder / "llm"
    shutil.copytree(checkpoints() / "llm", copy)
    for name in names:
        (copy / name).unlink()
    return copy


@case("pickled weights only", "pytorch_model.bin", "safetensors")
def _(folder: Path) -> list[str]:
    copy = without(folder, "model.safetensors")
    (copy / "pytorch_model.bin").write_bytes(b"pickle")
    return command(folder, f"omni.llm.path={copy}")


@case("weights cut short", "model.safetensors", "cannot be read")
def _(folder: Path) -> list[str]:
    copy = without(folder)
    os.truncate(copy / "model.safetensors", 5000)
    return command(folder, f"omni.llm.path={copy}")


@case("weights of another size", "omni.llm", "mlp")
def _(folder: Path) -> list[str]:
    copy = without(folder)
    hf = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(hf | {"intermediate_size": 64}))
    return command(folder, f"omni.llm.path={copy}")


@case("no tokenizer", "tokenizer")
def _(folder: Path) -> list[str]:
    return command(folder, f"omni.llm.path={without(folder, 'tokenizer.json', 'tokenizer_config.json')}")


@case("unsupported model type", "gpt2", "qwen3")
def _(folder: Path) -> list[str]:
    copy = without(folder)
    (copy / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return command(folder, f"omni.llm.path={copy}")


# Data.
setting("no data file", "absent.jsonl", "does not exist", omni={"data": {"train": "data/absent.jsonl"}})
rows_case("more tags than images", question("<image><image>Which?", images=[IMAGE]), "more <image> tags")
rows_case("more images than tags", question("Which?", images=[IMAGE]), "more images than <image> tags")
rows_case("image missing", question(images=["absent.png"]), "absent.png")
rows_case("audio where an image is expected", question(images=[AUDIO]), Path(AUDIO).name)
rows_case("image where audio is expected", question("<audio>Which?", audios=[IMAGE]), Path(IMAGE).name)
rows_case("samples too long", question("1 + " * 400), "max_length")
rows_case("no answer", {"messages": [{"role": "user", "content": "hello"}]}, "no row", "can be used")
rows_case("no usable columns", {"caption": "a digit"}, "caption")
rows_case("line that is not JSON", '{"messages": [', "not valid JSON")


@case("empty data set", "rows.jsonl", "empty")
def _(folder: Path) -> list[str]:
    return with_rows(folder, [])


@case("first bad row with on_error raise", "cut.png", "omni.data.on_error")
def _(folder: Path) -> list[str]:
    return with_rows(folder, [*good(4), question(images=[cut_image(folder)])], on_error="raise")


@case("too many bad rows", "1 of 5 rows", "max_skip_fraction")
def _(folder: Path) -> list[str]:
    return with_rows(folder, [*good(4), question(images=[cut_image(folder)])])


def cut_image(folder: Path) -> str:
    """A PNG that ends within its header."""
    file = folder / "cut.png"
    file.write_bytes(Path(IMAGE).read_bytes()[:20])
    return str(file)


# Places to write and to resume from. Root may write anywhere but under /proc, and through no file.
setting("no permission to write", "omni.output_dir", "/proc/run", sets=("omni.output_dir=/proc/run",))


@case("output folder is a file", "omni.output_dir", "occupied")
def _(folder: Path) -> list[str]:
    (folder / "occupied").write_text("")
    return command(folder, f"omni.output_dir={folder}/occupied")


@case("export into a foreign folder", "theirs", "letter.txt")
def _(folder: Path) -> list[str]:
    (folder / "theirs").mkdir()
    (folder / "theirs/letter.txt").write_text("precious")
    return [*command(folder), "--export", str(folder / "theirs")]


@case("resume without a checkpoint", "no complete checkpoint")
def _(folder: Path) -> list[str]:
    return [*command(folder), "--resume"]


@case("resume from a folder that is none", "--resume", "no checkpoint there")
def _(folder: Path) -> list[str]:
    return [*command(folder), "--resume", str(folder)]


@case("resume from an unreadable checkpoint", "not a complete checkpoint")
def _(folder: Path) -> list[str]:
    broken = folder / "broken"
    broken.mkdir()
    (broken / "index.json").write_text("{")
    return [*command(folder), "--resume", str(broken)]


@pytest.mark.parametrize("name", CASES)
def test_one_message_and_no_traceback(name: str, tmp_path: Path) -> None:
    make, words = CASES[name]
    status, said = run_command(make(tmp_path), timeout=60)
    assert status == 2, said
    assert TRACEBACK not in said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, said
    message = said[said.index("error: ") :]
    assert [word for word in words if word not in message] == [], message
    assert len(message) < 1500, "a message, not a dump"
    if "theirs" in words:
        assert (tmp_path / "theirs/letter.txt").read_text() == "precious"


def test_at_least_twenty_kinds() -> None:
    assert len(CASES) >= 20


def test_bad_rows_are_counted_and_skipped(tmp_path: Path) -> None:
    """Truncated image, wrong media count, broken line: reasons and numbers are printed, the run goes on."""
    bad = [question(images=[cut_image(tmp_path)]), question("<image><image>Which?", images=[IMAGE]), "{"]
    argv = with_rows(tmp_path, [*good(9), *bad], "train_batch_size=4", max_skip_fraction=0.3)
    status, said = run_command(argv)
    assert status == 0, said
    table = next(line for line in said.splitlines() if line.startswith("train "))
    assert table.split()[1] == "9"
    for reason in ("more <image> tags than images", "row is not valid JSON", "image"):
        assert f"1 {reason}" in table
    assert metrics(tmp_path / "run")[0]["samples"] == 4


def test_every_rank_ends_with_one_message(tmp_path: Path) -> None:
    """Two ranks, an error that only shows after they have joined: both end, rank 0 speaks."""
    argv = with_rows(tmp_path, [question(images=["absent.png"])] * 4, "pipeline.stages=2")
    ranks = Ranks(argv, 2)
    assert ranks.statuses(timeout=60) == [2, 2]
    assert ranks.text().count("error: ") == 1
    assert TRACEBACK not in ranks.text()


def test_placeholder_token_in_text_is_text(tmp_path: Path) -> None:
    """Its name in a message makes no slot for a feature row, beside a real image or alone."""
    rows = [question("<image>Is it <|image_pad|>?", images=[IMAGE]), question("What is <|image_pad|>?")]
    status, said = run_command(with_rows(tmp_path, rows * 2, "train_batch_size=4"))
    assert status == 0, said
    assert metrics(tmp_path / "run")[0]["loss"] > 0


def test_usage_error(tmp_path: Path) -> None:
    config = str(write_config(raw_config(tmp_path / "run"), tmp_path / "c.json"))
    status, said = run_command(["--config", config, "--learning_rate", "1"])
    assert status == 2 and "unrecognized arguments: --learning_rate" in said and TRACEBACK not in said
