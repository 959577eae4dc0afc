"""trace.png: planned above measured, planned work scaled to the measured compute."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_cases import plan_of, random_samples

from omni_ds.plan.actions import COMPUTE
from omni_ds.plan.build import build_step
from omni_ds.plan.predict import predict
from omni_ds.show import trace_picture
from omni_ds.show.gantt import draw_figure


def test_planned_work_takes_the_measured_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement that is the prediction, 3 ns a FLOP and a second late, gives two equal panels."""
    plan = plan_of(2)
    step = build_step(plan, 0, random_samples(plan, 12, 3))
    spans = predict(plan, step).spans
    late = 10**9
    measured = [
        [(action, late + 3 * start, late + 3 * end) for action, start, end in spans[rank]]
        for rank in range(2)
    ]
    drawn = []

    def record(panels, title, unit):
        drawn.append((panels, title))
        return draw_figure(panels, title, unit)

    monkeypatch.setattr(trace_picture, "draw_figure", record)
    trace_picture.draw_trace(plan, step, measured, tmp_path / "trace.png", step=7)
    (planned, actual), title = drawn[0]
    assert title.startswith("Step 7")
    for expected, found in zip(planned.spans, actual.spans, strict=True):
        for (action, start, end), (same, start_found, end_found) in zip(expected, found, strict=True):
            assert action == same
            assert (start, end) == pytest.approx((start_found, end_found), abs=1e-6)
    assert planned.length == pytest.approx(3 * predict(plan, step).length / 1e6)
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_waiting_shows_as_idle() -> None:
    plan = plan_of(2)
    step = build_step(plan, 0, random_samples(plan, 12, 3))
    spans = [predict(plan, step).spans[rank] for rank in range(2)]
    assert 0 < trace_picture._idle(spans) < 100
    compute = sum(end - start for row in spans for action, start, end in row if action.kind in COMPUTE)
    twice = [[(action, 2 * start, start + end) for action, start, end in row] for row in spans]
    length = max(end for row in twice for action, _, end in row if action.kind in COMPUTE)
    assert trace_picture._idle(twice) == pytest.approx(100 * (1 - compute / (2 * length)))
