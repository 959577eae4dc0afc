"""What a user sees: plan.png and plan.json of ``--plan``, trace.json and trace.png of ``--trace``."""

import json
from pathlib import Path

from e2e.runs import TRACEBACK, Ranks, config_file
from PIL import Image
from ranks import run_command

from omni_ds.plan.actions import COMPUTE, SENDS, Action


def test_plan_draws_every_mix(tmp_path: Path) -> None:
    config = config_file(tmp_path / "run", pipeline={"stages": 2})
    code, text = run_command(["--config", config, "--plan"])
    assert code == 0 and TRACEBACK not in text, text
    record = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert list(record["steps"]) == ["example", "image-heavy", "audio-heavy", "text-only"]
    assert record["steps"]["example"]["hash"] in text, "the printed step is the first one drawn"
    lengths = {mix: step["length"] for mix, step in record["steps"].items()}
    assert lengths["audio-heavy"] > lengths["text-only"] > 0
    picture = Image.open(tmp_path / "run" / "plan.png")
    assert picture.width == 2210 and picture.height > 600
    code, text = run_command(["--config", config, "--plan", "--out", str(tmp_path / "elsewhere")])
    assert code == 0, text
    assert (tmp_path / "elsewhere" / "plan.png").read_bytes() == (
        tmp_path / "run" / "plan.png"
    ).read_bytes(), "the same plan, the same picture"


def test_plan_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    config = config_file(tmp_path / "run")
    (tmp_path / "file").write_text("")
    code, text = run_command(["--config", config, "--plan", "--out", str(tmp_path / "file")])
    assert code == 2 and TRACEBACK not in text, text
    assert "cannot write plan.json and plan.png" in text and "--out" in text


def test_trace_shows_what_ran(tmp_path: Path) -> None:
    """One step of a run whose first stage encodes, with layers cut for it."""
    parallel = {"placement": "first_stage", "first_stage_cut": "with_encoders"}
    changes = {"encoder_parallel": parallel, "export": {"at_end": False}, "train": {"max_steps": 2}}
    config = config_file(tmp_path / "run", pipeline={"stages": 2}, omni=changes)
    text = Ranks(["--config", config, "--trace", "2"], 2).wait()
    assert "trace.png" in text and "perfetto" in text, text
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    named = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert named == {0: "rank 0", 1: "rank 1"}
    for event in events:
        assert event["args"]["step"] == 2 and event["ts"] >= 0 and event["dur"] >= 0
        assert {"name", "cat", "pid", "tid"} <= event.keys()
    for rank in (0, 1):
        mine = [event for event in events if event["pid"] == rank]
        actions = [Action.parse(event["name"]) for event in mine]
        assert sum(action.kind in COMPUTE for action in actions) and any(a.kind in SENDS for a in actions)
        for one, following in zip(mine, mine[1:], strict=False):
            assert following["ts"] >= one["ts"] + one["dur"] - 1e-3, "a rank does one thing at a time"
    picture = Image.open(tmp_path / "run" / "trace.png")
    assert picture.width == 2210 and picture.height > 300
