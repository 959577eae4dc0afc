"""Compute schedules: golden programs, bubble filling, uniform insertion.

`python tests/unit/test_plan_schedule.py` rewrites the golden files; look at the difference before
committing it.
"""

from pathlib import Path

import pytest

from omni_ds.plan.actions import Action, Kind
from omni_ds.plan.base import LLMWork, one_f_one_b, time_line
from omni_ds.plan.fill import EncoderWork, smallest_live
from omni_ds.plan.render import time_grid
from omni_ds.plan.schedule import first_stage, joint, uniform
from omni_ds.plan.shares import cut_windows

GOLDEN = Path(__file__).parent / "golden"
# policy, stages, micro-batches, window, encoder forward cost of a micro-batch over the LLM's of one stage,
# in percent
CASES = [
    ("joint", 2, 4, 1, 30),
    ("joint", 4, 8, 2, 100),
    ("joint", 4, 2, 1, 50),
    ("joint", 4, 16, 1, 40),
    ("uniform", 4, 8, 2, 100),
    ("first_stage", 4, 8, 1, 100),
]


def work(stages, count, forward=100, backward=200):
    return LLMWork(((forward,) * count,) * stages, backward and ((backward,) * count,) * stages)


def encoders(stages, count, size, percent, backward=True):
    windows = cut_windows(count, size)
    costs = tuple((percent * len(members) // stages,) * stages for members in windows)
    return EncoderWork(
        windows, costs, tuple(tuple(2 * c for c in row) for row in costs) if backward else None
    )


def build(policy, stages, count, size, percent):
    llm, encoder = work(stages, count), encoders(stages, count, size, percent)
    if policy == "joint":
        return joint(llm, encoder, live=4)
    return (uniform if policy == "uniform" else first_stage)(llm, encoder)


def golden_text(case):
    schedule = build(*case)
    lines = [",".join(map(str, actions)) for actions in schedule.stages]
    return "\n".join([*lines, f"# length {schedule.length}, live {schedule.live}", ""])


def golden_file(case):
    return GOLDEN / f"{'_'.join(map(str, case))}.csv"


@pytest.mark.parametrize("case", CASES, ids=lambda case: "_".join(map(str, case)))
def test_golden(case):
    assert golden_text(case) == golden_file(case).read_text()


def test_base_schedule_is_1f1b():
    assert one_f_one_b(2, 3) == (
        ((False, 0), (False, 1), (True, 0), (False, 2), (True, 1), (True, 2)),
        ((False, 0), (True, 0), (False, 1), (True, 1), (False, 2), (True, 2)),
    )
    assert time_line(work(4, 8)).length == (8 + 4 - 1) * 300
    assert time_line(work(4, 8, backward=None)).length == (8 + 4 - 1) * 100


def test_small_encoder_work_hides_in_bubbles():
    llm, encoder = work(8, 32), encoders(8, 32, 1, 80)
    schedule = joint(llm, encoder, live=32)
    alone, encoding = time_line(llm).length, 3 * 32 * 80 * 8 // 8 // 8
    assert schedule.length - alone < 0.2 * encoding


def test_windows_on_other_micro_batches_do_not_hold_up_the_first():
    llm = work(2, 4)
    late = EncoderWork(((2, 3),), ((500, 500),), ((1000, 1000),), (1,))
    schedule = joint(llm, late)
    assert schedule.stages[0][0] == Action(Kind.F, 0)
    assert Action(Kind.EF, 1) in schedule.stages[0] and Action(Kind.EB, 1) in schedule.stages[1]


def test_frozen_encoders_have_no_backward_and_no_live_bound():
    schedule = joint(work(2, 4), encoders(2, 4, 1, 50, backward=False))
    assert not any(a.kind is Kind.EB for actions in schedule.stages for a in actions)
    assert sum(a.kind is Kind.EF for a in schedule.stages[1]) == 4


def test_evaluation_has_forwards_only():
    schedule = joint(work(3, 6, backward=None), encoders(3, 6, 2, 50, backward=False))
    assert {a.kind for actions in schedule.stages for a in actions} == {Kind.F, Kind.EF}


def test_uniform_order_is_the_same_on_all_stages_whatever_the_costs():
    orders = set()
    for head in (0, 700):
        llm = LLMWork(((100,) * 8,) * 3 + ((100 + head,) * 8,), ((200,) * 8,) * 3 + ((200 + head,) * 8,))
        for percent in (1, 400):
            for actions in uniform(llm, encoders(4, 8, 2, percent)).stages:
                orders.add(tuple(a for a in actions if a.kind in (Kind.EF, Kind.EB)))
    assert len(orders) == 1


def test_live_bound_is_kept_and_never_below_what_1f1b_needs():
    windows = cut_windows(16, 1)
    assert smallest_live(windows, 4) == 4 and smallest_live(cut_windows(16, 4), 4) == 2
    assert smallest_live(windows, 1) == 1
    for live in (1, 4, 6):
        schedule = joint(work(4, 16), encoders(4, 16, 1, 50), live=live)
        assert schedule.live == max(4, live)
        for actions in schedule.stages:
            alive = 0
            for a in actions:
                alive += (a.kind is Kind.EF) - (a.kind is Kind.EB)
                assert alive <= schedule.live


def test_first_stage_is_slower_when_encoders_matter():
    llm = work(4, 16)
    inline = first_stage(llm, encoders(4, 16, 1, 400))
    # first_stage gives all of the window to stage 0
    alone = EncoderWork(cut_windows(16, 1), ((400, 0, 0, 0),) * 16, ((800, 0, 0, 0),) * 16)
    assert first_stage(llm, alone).length > 1.5 * joint(llm, encoders(4, 16, 1, 400), live=16).length
    assert inline.stages == first_stage(llm, alone).stages


def test_time_grid_is_to_scale():
    schedule = joint(work(2, 2), EncoderWork((), (), None))
    text = time_grid(schedule, ["a", "b"], cell=4)
    assert text.splitlines() == [
        "a | F0--F1--........B0------....B1------",
        "b | ....F0--B0------F1--B1------........",
    ]


if __name__ == "__main__":
    for each in CASES:
        golden_file(each).write_text(golden_text(each))
