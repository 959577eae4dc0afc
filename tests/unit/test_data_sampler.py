"""The order of samples: complete epochs, distinct rows in a batch, weights, random access by step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.sampler import GlobalBatchSampler
from omni_ds.errors import UserError


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 60), batch=st.integers(1, 25), seed=st.integers(0, 3))
def test_every_epoch_has_every_row_once_and_batches_are_distinct(size, batch, seed):
    sampler = GlobalBatchSampler([size], [1.0], batch, seed)
    steps = [sampler.rows(step) for step in range(5 * size // batch + 1)]
    drawn = [row for rows in steps for row in rows]
    for epoch in range(len(drawn) // size):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))
    if size >= batch:
        assert all(len(set(rows)) == batch for rows in steps)
    resumed = GlobalBatchSampler([size], [1.0], batch, seed)
    for step in reversed(range(len(steps))):
        assert resumed.rows(step) == steps[step]


def test_sets_of_equal_weight_are_one_set_and_epochs_differ():
    one, two = GlobalBatchSampler([30], None, 10, 1), GlobalBatchSampler([10, 20], [2.0, 2.0], 10, 1)
    assert [one.rows(s) for s in range(9)] == [two.rows(s) for s in range(9)]
    first, second = (sum((one.rows(3 * e + s) for s in range(3)), ()) for e in range(2))
    assert first != second and sorted(first) == sorted(second)
    assert GlobalBatchSampler([30], None, 10, 2).rows(0) != one.rows(0)


def test_weights_are_shares_of_the_draws():
    sizes, weights = [40, 1000, 300], [0.6, 0.1, 0.3]
    sampler = GlobalBatchSampler(sizes, weights, 16, 5)
    steps = [sampler.rows(step) for step in range(1500)]
    drawn = np.array(steps).ravel()
    counts = np.histogram(drawn, [0, 40, 1040, 1340])[0]
    assert np.allclose(counts / len(drawn), weights, atol=0.015)
    assert all(len(set(rows)) == 16 for rows in steps)
    for start, size in zip((0, 40, 1040), sizes, strict=True):  # each set goes through its own epochs
        own = drawn[(drawn >= start) & (drawn < start + size)]
        whole = own[: len(own) // size * size].reshape(-1, size)
        assert all(len(set(epoch)) == size for epoch in whole.tolist()) and len(whole)
    resumed = GlobalBatchSampler(sizes, weights, 16, 5)
    assert all(resumed.rows(step) == steps[step] for step in (1400, 1023, 1024, 0))


def test_total_steps():
    sampler = GlobalBatchSampler([30, 20], None, 16, 1)
    assert [sampler.total_steps(epochs) for epochs in (1, 2, 0.32, 16)] == [4, 7, 1, 50]


@pytest.mark.parametrize(("sizes", "weights"), [([0], None), ([5, 0], [1.0, 2.0]), ([], None)])
def test_nothing_to_draw(sizes, weights):
    with pytest.raises(UserError):
        GlobalBatchSampler(sizes, weights, 4, 1)


class Known:
    """A source of which the first blocks are known, and which says how many were asked for."""

    def __init__(self, sizes):
        self.blocks, self.stops, self.asked = len(sizes), np.cumsum(sizes), 0

    def stop(self, block):
        self.asked = max(self.asked, block + 1)
        return int(self.stops[block])


@settings(max_examples=60, deadline=None)
@given(
    sources=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6), min_size=1, max_size=3),
    batch=st.integers(1, 15),
)
def test_growing_sets_are_drawn_block_by_block(sources, batch):
    def made():
        growing = [Known(sizes) for sizes in sources]
        bounds = [sum(sizes) + 3 for sizes in sources]  # rows, of which three a set turn out unusable
        return GlobalBatchSampler(bounds, None, batch, 1, growing), growing

    sampler, growing = made()
    starts = np.cumsum([0] + [sum(sizes) + 3 for sizes in sources])
    usable = [start + i for start, sizes in zip(starts, sources, strict=False) for i in range(sum(sizes))]
    if not usable:
        with pytest.raises(UserError):
            sampler.rows(0)
        return
    steps, asked = [], []
    for step in range(3 * len(usable) // batch + 1):
        steps.append(sampler.rows(step))
        asked.append(max(known.asked / known.blocks for known in growing))
    drawn = [row for rows in steps for row in rows]
    for epoch in range(len(drawn) // len(usable)):
        assert sorted(drawn[epoch * len(usable) : (epoch + 1) * len(usable)]) == usable
    if len(usable) >= batch:
        assert all(len(set(rows)) == batch for rows in steps)
    resumed, _ = made()
    assert all(resumed.rows(step) == steps[step] for step in reversed(range(len(steps))))
    assert sampler.total_steps(1) == -(-int(starts[-1]) // batch)


def test_a_step_asks_only_for_the_blocks_it_needs():
    growing = [Known([100] * 5), Known([70])]
    sampler = GlobalBatchSampler([500, 70], None, 10, 1, growing)
    for step in range(57):
        rows = sampler.rows(step)
        assert growing[0].asked == min(((step + 1) * 10 - 1) // 114 + 1, 5)
        assert all(row < growing[0].asked * 100 or row >= 500 for row in rows)
    assert growing[0].asked == 5
