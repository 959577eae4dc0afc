"""Padding and cutting of packed batches."""

from __future__ import annotations

import pytest
import torch

from models.masks import MaskSpec
from models.packed import StageState, pad, shard
from omni_ds.plan.shards import even_bounds, padding_tokens, sequence_bounds
from tests.unit.model_helpers import packed_batch

LENGTHS = (9, 5, 1, 6)


def media_batch():
    batch = packed_batch(LENGTHS, vocab=61)
    batch.placeholder_positions = torch.tensor([2, 3, 9, 10, 11, 17])
    batch.feature_positions = torch.tensor([3, 9, 11, 17])
    batch.features = torch.arange(8.0).view(4, 2)
    return batch


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shards_together_are_the_batch(ranks: int) -> None:
    batch, bounds = media_batch(), even_bounds(21, ranks)
    shards = [shard(batch, bounds, index) for index in range(ranks)]
    for name in ("input_ids", "position_ids", "target_ids", "sample_of_target", "features"):
        assert torch.equal(torch.cat([getattr(s, name) for s in shards]), getattr(batch, name)), name
    for name in ("target_positions", "feature_positions", "placeholder_positions"):
        shifted = [getattr(s, name) + first for s, first in zip(shards, bounds, strict=False)]
        assert torch.equal(torch.cat(shifted), getattr(batch, name)), name
    for s, first, end in zip(shards, bounds, bounds[1:], strict=False):
        assert s.tokens == end - first and s.bounds == bounds and s.padding == 0
        assert s.segments == LENGTHS and torch.equal(s.cu_seqlens, batch.cu_seqlens) and s.max_seqlen == 9
        moved = s.to("meta")
        assert moved.placeholder_positions.is_meta and moved.bounds == bounds


def test_positions_of_several_kinds_are_cut_by_token() -> None:
    batch = packed_batch(LENGTHS, vocab=61)
    batch.position_ids = torch.arange(63).view(3, 21)
    padded = pad(batch, 3)
    assert padded.position_ids.shape == (3, 24) and padded.position_ids[:, -3:].tolist() == [[0, 1, 2]] * 3
    assert torch.equal(shard(batch, even_bounds(21, 2), 1).position_ids, batch.position_ids[:, 11:])


def test_one_part_is_the_batch_itself() -> None:
    batch = media_batch()
    assert shard(batch, (0, 21), 0) is batch and pad(batch, 0) is batch
    assert shard(packed_batch(LENGTHS, vocab=61), even_bounds(21, 2), 0).features is None


def test_lost_segments_stay_with_every_shard() -> None:
    batch = media_batch()
    batch.lost = (1,)
    whole = pad(batch, 3)
    assert whole.lost == (1,)
    assert [shard(whole, even_bounds(24, 3), i).to("meta").lost for i in range(3)] == [(1,)] * 3


@pytest.mark.parametrize("lengths", [(2,), (1, 1), ()])
def test_padding_is_a_segment_without_targets(lengths: tuple[int, ...]) -> None:
    batch = packed_batch(lengths, vocab=61)
    count = padding_tokens(batch.tokens, 5, collective=True)
    padded = pad(batch, count)
    assert padded.tokens == 5 and padded.padding == count == 5 - sum(lengths)
    assert padded.segments == (*lengths, count) and padded.cu_seqlens[-1] == 5
    assert padded.cu_seqlens.dtype == torch.int32 and len(padded.cu_seqlens) == len(lengths) + 2
    assert padded.max_seqlen == max(padded.segments)
    assert padded.input_ids[-count:].tolist() == [0] * count
    assert padded.position_ids[-count:].tolist() == list(range(count))
    assert torch.equal(padded.target_positions, batch.target_positions)
    bounds = sequence_bounds(batch.tokens, 5, True)
    shards = [shard(padded, bounds, index) for index in range(5)]
    assert [s.tokens for s in shards] == [1] * 5 and all(s.padding == count for s in shards)


def test_wrong_cuts_are_refused() -> None:
    batch = packed_batch(LENGTHS, vocab=61)
    half = shard(batch, even_bounds(21, 2), 0)
    with pytest.raises(AssertionError, match="22 for 21 tokens"):
        shard(batch, even_bounds(22, 2), 0)
    with pytest.raises(AssertionError, match="already"):
        shard(half, even_bounds(11, 2), 0)
    with pytest.raises(AssertionError, match="whole"):
        pad(half, 1)
    with pytest.raises(AssertionError, match="group"):
        StageState(half).packing_for(None)


def test_packing_is_made_once() -> None:
    state = StageState(packed_batch(LENGTHS, vocab=61))
    packing = state.packing_for(None)
    assert state.packing_for(None) is packing and packing.ulysses is None
    assert packing.with_mask(MaskSpec(causal=True)).segments == LENGTHS
