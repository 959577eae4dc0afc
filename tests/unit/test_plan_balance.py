"""Feature rows move once or not at all, in every layout; and the numbers that say what balancing did."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.plan_cases import plan_of, random_samples
from unit.test_plan_gangs import with_giant

from omni_ds.plan.actions import Kind
from omni_ds.plan.balance import as_given, feature_bytes_bound, long_share, ratio, rows_to_move
from omni_ds.plan.build import build_step
from omni_ds.plan.render import format_plan
from omni_ds.plan.validate import validate_step

# (pipeline, tensor, sequence, data): the layouts of tests/parity/backbone.py, some with more replicas.
LAYOUTS = [
    (2, 1, 1, 1),
    (1, 2, 1, 1),
    (1, 1, 2, 1),
    (2, 2, 1, 1),
    (2, 1, 2, 1),
    (1, 2, 2, 1),
    (2, 2, 2, 1),
    (4, 1, 1, 2),
    (1, 4, 1, 1),
    (1, 1, 4, 1),
    (1, 1, 1, 4),
    (2, 2, 1, 2),
    (2, 1, 2, 2),
    (1, 2, 2, 2),
]


def case(layout: tuple[int, ...], long_short: str | int, giant: bool = False, **options):
    pipe, tensor, sequence, data = layout
    heads = {"tensor": tensor, "sequence": sequence, "max_tokens_per_micro_batch": 8192 if giant else 256}
    plan = plan_of(pipe, data, long_short=long_short, **heads, **options)
    samples = with_giant(plan) if giant else random_samples(plan, 24, 7)
    return plan, build_step(plan, 0, samples)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("long_short", "giant"), [("off", False), (4, False), ("auto", True)])
def test_no_row_moves_twice(layout: tuple[int, ...], long_short: str | int, giant: bool) -> None:
    plan, step = case(layout, long_short, giant)
    validate_step(plan, step)
    moved, messages = 0, 0
    for replica in step.replicas:
        arrived = {}
        pairs = set()
        for transfer in replica.transfers:
            pair = (transfer.window, transfer.source, transfer.destination)
            assert pair not in pairs, f"two messages {pair}"
            pairs.add(pair)
            for piece in transfer.pieces:
                for row in range(piece.rows):
                    token = (piece.micro_batch, piece.destination_start + row)
                    assert token not in arrived, f"the row of {token} arrives twice"
                    arrived[token] = transfer.destination
            if not transfer.local:
                moved, messages = moved + transfer.rows, messages + 1
        assert len(arrived) == sum(
            item.rows for mb in replica.micro_batches for s in mb.samples for item in s.items
        )
    assert moved == rows_to_move(step)
    actions = [action for rank in range(plan.mesh.world_size) for action in step.actions(rank)]
    for kind in (Kind.SEND_X, Kind.RECV_X, Kind.SEND_G, Kind.RECV_G):
        assert sum(action.kind is kind for action in actions) == messages, kind
    assert feature_bytes_bound(step, 64, 2) == 2 * moved * 64 * 2


def test_gradients_of_frozen_encoders_do_not_move() -> None:
    _, step = case((2, 1, 1, 1), "off", towers=False, projectors=False)
    assert feature_bytes_bound(step, 8, 4) == rows_to_move(step) * 32 > 0


def test_a_plan_prints_what_has_to_move() -> None:
    plan, step = case((2, 1, 1, 2), 4)
    least = feature_bytes_bound(step, plan.llm.hidden, 2)
    assert f"at least {least} bytes" in format_plan(plan, step)


def test_imbalance_as_given() -> None:
    assert as_given([4, 4, 1, 1], [[3], [1, 2], [], [6]], 2, 2) == (2.0, 1.6)
    assert as_given([], [], 2, 2) == (1.0, 1.0) == (ratio([]), ratio([0, 0]))
    plan = plan_of(2, 2)
    samples = sorted(random_samples(plan, 32, 1), key=lambda sample: sample.tokens)
    step = build_step(plan, 0, [replace(sample, row=row) for row, sample in enumerate(samples)])
    assert step.llm_imbalance < 1.02 and step.llm_imbalance_given > 1.3
    assert 1 <= step.encoder_imbalance < step.encoder_imbalance_given


def test_share_of_long_media() -> None:
    plan = plan_of(1, 4, max_tokens_per_micro_batch=8192)
    samples = with_giant(plan)
    step = build_step(plan, 0, samples)
    media = sum(len(sample.items) for sample in samples)
    sliced = {
        (s.row, i.ordinal)
        for replica in step.replicas
        for mb in replica.micro_batches
        for s in mb.samples
        for i in s.items
        if i.gang > 1 or i.start
    }
    assert sliced and step.long_items == len(sliced) / media
    assert long_share(samples) == 0.0
