"""plan.png and plan.json: right size, something on it, all of the plan in it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from plan_cases import plan_of, random_samples

from omni_ds.plan.actions import COMPUTE, Action, Kind
from omni_ds.plan.build import Plan, build_step
from omni_ds.plan.example import example_samples, mixes_of
from omni_ds.plan.predict import StepCosts, predict
from omni_ds.plan.simulate import Links
from omni_ds.show.palette import STYLES, luminance, style_of
from omni_ds.show.plan_picture import draw_plan
from omni_ds.show.plan_record import Planned, write_plan


def planned(plan: Plan, *mixes: str) -> dict[str, Planned]:
    return {
        mix: Planned.of(plan, build_step(plan, 0, example_samples(plan, 24, 256, mix=mix))) for mix in mixes
    }


def test_predicted_work_is_the_work_of_the_step() -> None:
    plan = plan_of(2, 2)
    step = build_step(plan, 0, random_samples(plan, 24, 3))
    simulation, costs = predict(plan, step), StepCosts(plan, step)
    encoders = {meta.name: meta for meta in plan.encoders}
    items = [i for r in step.replicas for mb in r.micro_batches for s in mb.samples for i in s.items]
    assert items
    spent = {kind: 0 for kind in (Kind.EF, Kind.EB)}
    for rank, spans in simulation.spans.items():
        assert [action for action, _, _ in spans] == list(step.actions(rank))
        for action, start, end in spans:
            assert end - start == costs(rank, action)
            if action.kind in spent:
                spent[action.kind] += end - start
    assert spent[Kind.EF] == sum(encoders[i.encoder].forward_flops(i.segments, i.rows) for i in items)
    assert spent[Kind.EB] == sum(encoders[i.encoder].backward_flops(i.segments, i.rows) for i in items)


def test_messages_take_their_rows_time() -> None:
    plan = plan_of(2)
    step = build_step(plan, 0, random_samples(plan, 12, 3))
    simulation = predict(plan, step, links=Links(latency=7, row_time=2))
    tokens = [mb.tokens for mb in step.replicas[0].micro_batches]
    rows = {(t.window, t.source): t.rows for t in step.replicas[0].transfers}
    seen = set()
    for rank, spans in simulation.spans.items():
        for action, start, end in spans:
            if action.kind in (Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B):
                assert end - start == 7 + 2 * tokens[action.index], action
            elif action.kind in (Kind.SEND_X, Kind.RECV_G):
                assert end - start == 7 + 2 * rows[action.index, rank], action
            seen.add(action.kind)
    assert {Kind.SEND_F, Kind.SEND_B, Kind.SEND_X, Kind.RECV_G} <= seen


@pytest.mark.parametrize("data", [1, 2])
def test_record_holds_the_whole_plan(tmp_path: Path, data: int) -> None:
    plan = plan_of(2, data)
    steps = planned(plan, "example", "text-only")
    write_plan(plan, steps, tmp_path / "plan.json")
    read = json.loads((tmp_path / "plan.json").read_text())
    assert read["time_unit"] == "FLOP" and read["mesh"]["data"] == data
    assert list(read["steps"]) == ["example", "text-only"]
    for name, record in read["steps"].items():
        step = steps[name].step
        assert record["hash"] == f"{step.hash:016x}"
        for rank in range(2 * data):
            entry = record["ranks"][rank]
            assert tuple(Action.parse(text) for text, _, _ in entry["actions"]) == step.actions(rank)
            ends = [end for _, _, end in entry["actions"]]
            assert max(ends) <= record["length"]
            compute = sum(e - s for text, s, e in entry["actions"] if Action.parse(text).kind in COMPUTE)
            assert compute + sum(entry["idle"].values()) == record["length"]
        for replica, written in zip(step.replicas, record["replicas"], strict=True):
            assert [w["micro_batches"] for w in written["windows"]] == [
                list(w.micro_batches) for w in replica.windows
            ]
            items = sum(len(share) for w in written["windows"] for share in w["shares"].values())
            assert items == sum(len(s.items) for mb in replica.micro_batches for s in mb.samples)
            assert sum(t["rows"] for t in written["transfers"]) == sum(t.rows for t in replica.transfers)
            assert sum(p[3] for t in written["transfers"] for p in t["pieces"]) == sum(
                t["rows"] for t in written["transfers"]
            )


def test_picture_has_a_row_a_rank_and_every_colour(tmp_path: Path) -> None:
    from PIL import Image

    plan = plan_of(4)
    draw_plan(plan, planned(plan, "image-heavy", "text-only"), tmp_path / "both.png")
    draw_plan(plan, planned(plan, "text-only"), tmp_path / "text.png")
    both, text = Image.open(tmp_path / "both.png"), Image.open(tmp_path / "text.png")
    assert both.width == text.width == 2210
    assert both.height > text.height + 4 * 50, "a panel of four ranks more"
    found = set(both.convert("RGB").get_flattened_data())
    for name in ("idle", "F", "B", "EF", "EB", "features", "activations"):
        face = STYLES[name].face
        assert tuple(int(face[i : i + 2], 16) for i in (1, 3, 5)) in found, f"no {name} in the picture"


def test_more_replicas_are_more_rows(tmp_path: Path) -> None:
    from PIL import Image

    plan = plan_of(2, 2)
    steps = planned(plan, "example")
    draw_plan(plan, steps, tmp_path / "one.png")
    draw_plan(plan, steps, tmp_path / "two.png", replicas=(0, 1))
    one, two = Image.open(tmp_path / "one.png"), Image.open(tmp_path / "two.png")
    assert two.height > one.height + 2 * 50


def test_colours_differ_in_greyscale() -> None:
    names = ("idle", "F", "B", "EF", "EB", "features")
    for one, other in itertools.combinations(names, 2):
        difference = abs(luminance(STYLES[one].face) - luminance(STYLES[other].face))
        hatched = bool(STYLES[one].hatch) != bool(STYLES[other].hatch)
        assert difference > (0.05 if hatched else 0.15), (one, other, difference)


def test_every_action_has_a_style_but_receives() -> None:
    for kind in Kind:
        style = style_of(Action(kind, 0, 0, 1))
        assert (style is None) == kind.name.startswith("RECV"), kind


def test_mixes_follow_the_encoders() -> None:
    plan = plan_of(2)
    assert mixes_of(plan) == ("example", "image-heavy", "audio-heavy", "text-only")
    assert mixes_of(plan_of(2, encoders=False)) == ("example",)
    counts = {
        mix: [i.encoder for s in example_samples(plan, 32, 256, mix=mix) for i in s.items]
        for mix in mixes_of(plan)
    }
    assert set(counts["example"]) == {"image", "audio"}
    assert set(counts["image-heavy"]) == {"image"} and set(counts["audio-heavy"]) == {"audio"}
    assert len(counts["image-heavy"]) > len(counts["example"])
    assert not counts["text-only"]
    for mix in mixes_of(plan):
        for sample in example_samples(plan, 32, 256, mix=mix):
            covered = [t for item in sample.items for s, n in item.spans for t in range(s, s + n)]
            assert len(set(covered)) == len(covered) <= sample.tokens <= 256
