"""Regions: rectangles of parameters meet in rectangles, and a flat range is three of them at most."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omni_ds.plan.mesh import Mesh
from omni_ds.plan.region import Region
from omni_ds.plan.shards import padding_tokens, sequence_bounds


@st.composite
def regions(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=2, max_size=3)))
    dim = draw(st.integers(0, 1))
    start = draw(st.integers(0, shape[dim]))
    region = Region.of(shape, dim, start, draw(st.integers(start, shape[dim])))
    return region.within(1 - dim, 0, draw(st.integers(0, shape[1 - dim])))


@given(regions(), st.data())
def test_runs_cover_a_flat_range_in_order(region, data):
    whole = np.arange(np.prod(region.shape)).reshape(region.shape)
    local = whole[region.index]
    assert local.size == region.elements
    offset = data.draw(st.integers(0, region.elements))
    length = data.draw(st.integers(0, region.elements - offset))
    matrix, pieces = whole.reshape(region.shape[0], -1), []
    for piece, at in region.runs(offset, length):
        assert at == sum(p.size for p in pieces)
        pieces.append(matrix[slice(*piece.rows), slice(*piece.columns)].ravel())
    assert len(pieces) <= 3
    assert np.array_equal(
        np.concatenate([*pieces, np.zeros(0, int)]), local.ravel()[offset : offset + length]
    )


def test_region_shapes():
    assert Region.of((6, 4, 2), 1, 1, 3).local_shape == (6, 2, 2)
    assert Region.of((6,), 0, 2, 5).local_shape == (3,) and Region.of((6,), 0, 2, 5).index == (slice(2, 5),)
    assert Region.whole((6, 4)).is_whole and not Region.of((6, 4), 0, 0, 5).is_whole


def test_expert_and_shard_groups():
    mesh = Mesh(pipe=2, data=4, tensor=2, expert=2)
    assert mesh.expert_groups()[:2] == ((0, 2), (4, 6)) and mesh.expert_data_groups()[0] == (0, 4)
    assert mesh.shard_groups()[:2] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert Mesh(pipe=1, data=1, tensor=4).kv_groups(2) == ((0, 1), (2, 3))


def test_every_sequence_rank_has_a_token():
    assert sequence_bounds(7, 2, False) == (0, 4, 7)
    assert sequence_bounds(1, 4, False) == (0, 1, 2, 3, 4) and padding_tokens(1, 4, False) == 3
    assert sequence_bounds(0, 2, False) == (0, 0, 0) and sequence_bounds(0, 2, True) == (0, 1, 2)
