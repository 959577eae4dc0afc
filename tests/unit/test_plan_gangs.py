"""Slices of long images on gangs: planned, valid, and what they are for."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.plan_cases import image_encoder, plan_of, random_samples

from omni_ds.engine.timing import Timing
from omni_ds.plan import retime
from omni_ds.plan import step as planning
from omni_ds.plan.actions import Action, Kind
from omni_ds.plan.build import build_step
from omni_ds.plan.gangs import blocks_for, guests_of, largest_gang, stage_blocks
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.sample import Item, SampleMeta
from omni_ds.plan.times import TimeModel, llm_key
from omni_ds.plan.validate import validate_step


def with_giant(plan, count: int = 24, side: int = 64, seed: int = 0) -> list[SampleMeta]:
    """Samples of which the first has an image of (side x 8)^2 pixels."""
    meta = plan.encoders[0]
    segments, rows = meta.measure((8 * side, 8 * side))
    giant = Item(0, 0, meta.name, (8 * side, 8 * side), segments, rows, ((1, rows),))
    samples = list(random_samples(plan, count, seed))
    samples[0] = SampleMeta(0, rows + 9, 5, (giant,))
    return samples


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from((2, 4, 8)))
def test_slices_cover_tokens_and_rows(rows, columns, ranks):
    meta = image_encoder()
    cut = meta.slices((8 * rows, 8 * columns), ranks)
    if rows * columns < ranks:
        assert cut is None
        return
    tokens, features = cut
    assert tokens[0] == features[0] == 0 and len(tokens) == len(features) == ranks + 1
    assert (sum(meta.measure((8 * rows, 8 * columns))[0]), meta.measure((8 * rows, 8 * columns))[1]) == (
        tokens[-1],
        features[-1],
    )
    assert list(tokens) == sorted(tokens) and list(features) == sorted(features)


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from((2, 4, 8)))
def test_pixel_rows_hold_the_patches_of_a_slice(rows, columns, ranks):
    meta, shape = image_encoder(), (8 * rows + 3, 8 * columns + 5)
    cut = meta.slices(shape, ranks)
    if cut is None:
        return
    for index, (start, stop) in enumerate(pairwise(cut[0])):
        first, last = meta.slice_pixels(shape, ranks, index)
        assert first % 8 == last % 8 == 0 and 0 <= first < last <= 8 * rows
        assert first // 8 * columns <= start < (first // 8 + 1) * columns
        assert (last // 8 - 1) * columns < stop <= last // 8 * columns


def test_blocks_are_neighbours_of_one_stage_and_group():
    mesh = Mesh(pipe=2, data=4, tensor=2)
    assert stage_blocks(mesh, 4, 2) == (((0, 1, 2, 3), (8, 9, 10, 11)), ((4, 5, 6, 7), (12, 13, 14, 15)))
    assert largest_gang(mesh, 4, 8) == 8 and largest_gang(mesh, 2, 8) == 4 and largest_gang(mesh, 1, 8) == 2
    assert largest_gang(Mesh(2, 3), 3, 8) == 2 and largest_gang(Mesh(4, 1), 1, 8) == 1


@pytest.mark.parametrize(
    "mesh", [(1, 4, 1, 1), (2, 4, 1, 1), (2, 2, 2, 1), (2, 2, 1, 2), (1, 1, 2, 2), (2, 3, 1, 1)]
)
@pytest.mark.parametrize("forward_only", [False, True])
def test_a_giant_is_sliced_and_the_plan_is_valid(mesh, forward_only):
    pipe, data, sequence, tensor = mesh
    plan = plan_of(pipe, data, sequence=sequence, tensor=tensor, max_tokens_per_micro_batch=8192)
    step = build_step(plan, 0, with_giant(plan), forward_only=forward_only)
    validate_step(plan, step)
    slices = [p for r in step.replicas for w in r.windows for s in w.shares for p in s.slices]
    assert slices and len(slices) % slices[0].item.gang == 0
    assert sorted(p.item.slice for p in slices if p.item.row == 0) == list(range(slices[0].item.gang))


def test_the_giant_no_longer_sets_the_pace():
    plans = {
        mode: plan_of(1, 8, max_tokens_per_micro_batch=8192, long_short=mode) for mode in ("off", "auto")
    }
    loads = {}
    for mode, plan in plans.items():
        step = build_step(plan, 0, with_giant(plan, 64))
        validate_step(plan, step)
        loads[mode] = step.encoder_imbalance
    assert loads["off"] > 6 and loads["auto"] < 1.25


@pytest.mark.parametrize("mesh", [(1, 4), (2, 4)])
def test_measured_times_count_slices_of_guests(mesh, monkeypatch):
    pipe, _ = mesh
    plan = plan_of(*mesh, max_tokens_per_micro_batch=8192)
    llm = {llm_key(kind, s): (10**6, 10**3, 0) for kind in "FB" for s in range(pipe)}
    times = TimeModel(0, llm | {kind: (10**4, 10**5, 10**3, 10**6, 0) for kind in ("EF", "EB")})
    found = {}

    def spy(plan, times, replicas, woven, training):
        found["work"] = retime._encoder_work(plan, times, replicas, woven, training)
        return retime.retime(plan, times, replicas, woven, training)

    monkeypatch.setattr(planning, "retime", spy)
    made = build_step(plan, 0, with_giant(plan), times=times)
    validate_step(plan, made)
    assert any(window for replica in made.replicas for window in replica.guests)
    for window, forward in zip(found["work"].numbers, found["work"].forward, strict=True):
        expected = []
        for stage in range(pipe):
            dearest = []
            for replica in made.replicas:
                ranks = replica.ranks[stage * plan.mesh.lanes : (stage + 1) * plan.mesh.lanes]
                dearest.append(max(predicted(plan, times, made, rank, window) for rank in ranks))
            expected.append(sum(dearest) // len(dearest))
        assert forward == tuple(expected)


def predicted(plan, times, made, rank, window):
    items = [placed.item for _, share in made.shares(rank, window) for placed in share.items]
    sizes = [
        sum(item.sizes[i] for item in items if item.encoder == meta.name)
        for meta in plan.encoders
        for i in range(2)
    ]
    return times.predict("EF", sizes) if any(sizes) else 0


def test_windows_with_slices_are_not_observed():
    plan = plan_of(2, 4, max_tokens_per_micro_batch=8192)
    made = build_step(plan, 0, with_giant(plan))
    left_out = 0
    for rank in range(plan.mesh.world_size):
        timing = Timing(plan, rank, None, 2)
        windows = range(len(made.replica_of(rank).windows))
        compute = [(Action(kind, w), 1000 + w) for kind in (Kind.F, Kind.EF, Kind.EB) for w in windows]
        assert timing.wants(5) and timing.add(4, made, compute) is None
        sliced = {w for w in windows if any(share.slices for _, share in made.shares(rank, w))}
        kept = [o.nanoseconds - 1000 for o in timing._observations if o.key in ("EF", "EB")]
        assert kept == 2 * [w for w in windows if w not in sliced]
        assert len(timing._observations) == len(windows) + len(kept)
        left_out += len(sliced)
    assert left_out == sum(
        len({s.rank for r in made.replicas for s in r.windows[w].shares if s.slices})
        for w in range(len(made.replicas[0].windows))
    )


def test_off_where_it_cannot_be():
    assert plan_of(2, 4, encoder_zero_stage=3).largest_gang == 1
    assert plan_of(2, 4, placement="first_stage").largest_gang == 1
    assert plan_of(2, 4, long_short="off").largest_gang == 1
    assert plan_of(2, 4, max_sp=2).largest_gang == 2
    plan = plan_of(2, 2, group_size=1)
    assert plan.largest_gang == 1


def test_a_replica_that_is_left_over_is_served_by_its_reorder_group() -> None:
    """Three ranks, gangs of two: the third has no neighbour to share an image with."""
    mesh = Mesh(pipe=1, data=3)
    assert blocks_for(mesh, 2, 3, 0) == blocks_for(mesh, 2, 3, 2) == ((0, 1),)
    assert guests_of(mesh, 2, 3, 2) == (0, 1)
