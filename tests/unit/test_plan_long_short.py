"""Long recordings in parts: every row once, at its place, and the load of ranks evened."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.plan_cases import audio_encoder, plan_of

from omni_ds.plan.build import build_step
from omni_ds.plan.cost import EncoderCost
from omni_ds.plan.long_short import cut_spans, split_item, split_recordings
from omni_ds.plan.sample import Item, SampleMeta
from omni_ds.plan.validate import validate_step


def recording(meta, frames: int, row: int = 0) -> Item:
    segments, rows = meta.measure((frames,))
    return Item(row, 0, meta.name, (frames,), segments, rows, ((3, 1), (5, rows - 1)))


@given(st.integers(201, 3000), st.integers(1, 5))
def test_parts_make_up_the_recording(frames, count):
    meta = audio_encoder()  # windows of 100 frames and 50 tokens, 4 of which make a row
    assert meta.segments_per_slice == 2
    item = recording(meta, frames)
    parts = split_item(meta, item, 2 * count)
    assert [part.start for part in parts] == [200 * count * i for i in range(len(parts))]
    assert sum(part.shape[0] for part in parts) == frames
    assert sum((part.segments for part in parts), ()) == item.segments
    tokens = [o + i for part in parts for o, n in part.spans for i in range(n)]
    assert tokens == [o + i for o, n in item.spans for i in range(n)]
    assert all(sum(n for _, n in part.spans) == part.rows for part in parts)


def test_threshold_and_off():
    meta = audio_encoder()
    cost = EncoderCost((meta,))
    sample = SampleMeta(0, 2000, 10, (recording(meta, 1000),))
    assert split_recordings([sample], cost, 4, "off") == (sample,)
    assert split_recordings([sample], cost, 4, 1000) == (sample,)
    (split,) = split_recordings([sample], cost, 4, 200)  # of 500 tokens
    assert [sum(part.segments) for part in split.items] == [200, 200, 100]


def test_cut_spans():
    assert cut_spans(((3, 2), (9, 4)), 1, 3) == ((4, 1), (9, 2))
    assert cut_spans(((3, 2),), 2, 0) == ()


@pytest.mark.parametrize("long_short,most", [("off", 4.1), ("auto", 1.35)])
def test_one_long_recording_does_not_hold_up_the_others(long_short, most):
    plan = plan_of(4, long_short=long_short, max_tokens_per_micro_batch=4096)
    meta = plan.encoders[1]
    samples = [SampleMeta(0, 2000, 10, (recording(meta, 6000),))]
    samples += [SampleMeta(row, 40, 10, ()) for row in range(1, 16)]
    step = build_step(plan, 0, samples)
    validate_step(plan, step)
    assert step.encoder_imbalance <= most
