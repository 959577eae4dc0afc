"""The benchmark of several GPUs, on two CPU ranks: runs, agrees, reports."""

import json
from pathlib import Path

from benchmarks.multi_gpu import main


def test_two_variants(tmp_path: Path) -> None:
    chosen = "--cpu 2 --tiny --models vision --layouts pp2 --variants ours,first_stage --per_rank 2 --steps 1"
    repeats = ["--repeats", "2", "--budget", "64", "--limit", "60"]
    files = ["--json", str(tmp_path / "rows.json"), "--report", str(tmp_path / "report")]
    assert main([*chosen.split(), "--workloads", "image:text 7:3", *repeats, *files]) == 0
    ours, inline = json.loads((tmp_path / "rows.json").read_text())
    assert (ours["variant"], inline["variant"]) == ("ours", "first_stage")
    for row in (ours, inline):
        assert len(row["seconds_all"]) == 2
        assert abs(sum(row["shares"].values()) - 1) < 1e-9
        assert 0 < row["replayed_seconds"] <= row["measured_step_seconds"]
        assert row["planned_seconds"] > 0 and row["megabytes_sent"] > 0
    assert abs(ours["loss"] - inline["loss"]) < 1e-5 * ours["loss"]
    text = (tmp_path / "report" / "report.md").read_text()
    assert "agree by workload" in text and "## vision, pp2" in text
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"report.md", "plan.png", "trace.png"}
