"""Steps as a rank receives them: packed tokens, media of its share, failures; with and without workers."""

import json

import numpy as np
import pytest
import torch

from data.index import open_dataset
from data.loader import EvalLoader, StepLoader
from data.pack import pack
from data.sampler import GlobalBatchSampler
from omni_ds.engine.step_input import prepare
from omni_ds.plan.batch import MicroBatch
from omni_ds.plan.build import PlanOptions, build_plan
from omni_ds.plan.llm_meta import LLMMeta
from omni_ds.plan.mesh import Mesh
from tests.unit.data_helpers import composition, flac, png, rows_of_all_kinds, settings, source

LLM = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 410,
    "tie_word_embeddings": True,
}
BATCH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loader")
    png(folder / "a.png", 40, 30)
    png(folder / "b.png", 20, 20, 10)
    flac(folder / "a.flac", 8000)
    flac(folder / "b.flac", 5000)
    rows = rows_of_all_kinds() * 5
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def dataset(folder):
    return open_dataset([source(folder / "train.jsonl")], settings(), *composition(), builder=True)


def make_plan(dataset, pipe=1, data=1, **options):
    options = {"max_tokens_per_micro_batch": 128, **options}
    llm = LLMMeta.from_config(LLM, trainable=True)
    mesh = Mesh.from_world(pipe * data, pipe=pipe)
    return build_plan(llm, tuple(dataset.encoder_metas.values()), mesh, PlanOptions(**options))


def sampler(dataset):
    return GlobalBatchSampler(dataset.sizes, dataset.weights, BATCH, 3)


def same(a, b):
    assert (
        a.step_plan.hash == b.step_plan.hash and a.failed == b.failed and a.packed.keys() == b.packed.keys()
    )
    for index, packed in a.packed.items():
        for name, array in vars(packed).items():
            assert np.array_equal(array, getattr(b.packed[index], name)), name
    assert [(w, e, len(v)) for w, m in a.media.items() for e, v in m.items()] == [
        (w, e, len(v)) for w, m in b.media.items() for e, v in m.items()
    ]
    for window, media in a.media.items():
        for encoder, values in media.items():
            assert all(map(torch.equal, values, b.media[window][encoder]))


@pytest.mark.parametrize(("pipe", "data"), [(1, 1), (2, 2)])
def test_every_micro_batch_and_every_medium_is_somewhere_once(dataset, pipe, data):
    plan = make_plan(dataset, pipe, data)
    loaders = [StepLoader(dataset, sampler(dataset), plan, rank, 2, 4) for rank in range(pipe * data)]
    for batches in zip(*loaders, strict=True):
        step = batches[0].step_plan
        assert {batch.step_plan.hash for batch in batches} == {step.hash} and step.samples == BATCH
        encoded = []
        for rank, batch in enumerate(batches):
            replica = step.replica_of(rank)
            assert list(batch.packed) == [micro.index for micro in replica.micro_batches]
            for window in replica.windows:
                share = window.share(rank).items
                media = batch.media.get(window.index, {})
                assert sum(map(len, media.values())) == len(share)
                for encoder, values in media.items():
                    own = [placed.item for placed in share if placed.item.encoder == encoder]
                    for item, value in zip(own, values, strict=True):
                        assert np.array_equal(value.numpy(), dataset.load_media(item.row, item.ordinal))
                        encoded.append((item.row, item.ordinal))
        expected = [
            (item.row, item.ordinal)
            for row in sampler(dataset).rows(step.step)
            for item in dataset.meta(row).items
        ]
        assert sorted(encoded) == sorted(expected)


def test_a_gang_loads_the_pixel_rows_of_its_slices(dataset):
    plan = make_plan(dataset, data=2, long_short=2)
    (meta,) = (meta for meta in plan.encoders if meta.name == "vision")
    found = cropped = 0
    for rank in range(2):
        (batch,) = StepLoader(dataset, sampler(dataset), plan, rank, 0, 1)
        step = batch.step_plan
        for window in step.replica_of(rank).windows:
            sliced = [p.item for _, share in step.shares(rank, window.index) for p in share.slices]
            values = batch.long_media.get(window.index, [])
            for item, value in zip(sliced, values, strict=True):
                whole = dataset.load_media(item.row, item.ordinal)
                first, stop = meta.slice_pixels(item.shape, item.gang, item.slice)
                assert np.array_equal(value.numpy(), whole[:, first:stop])
                found, cropped = found + 1, cropped + (stop - first < item.shape[0])
    assert found and cropped


def test_packing(dataset):
    rows = (0, 2, 3, 4, 1)
    metas = tuple(dataset.metas(rows))
    packed, failed = pack(dataset, MicroBatch(0, metas))
    assert not failed and packed.cu_seqlens.dtype == np.int32
    samples = [dataset.encode(row) for row in rows]
    assert np.array_equal(packed.input_ids, np.concatenate([s.input_ids for s in samples]))
    bounds = list(zip(packed.cu_seqlens[:-1], packed.cu_seqlens[1:], strict=True))
    for number, ((start, stop), sample) in enumerate(zip(bounds, samples, strict=True)):
        assert packed.position_ids[start:stop].tolist() == list(range(stop - start))
        own = packed.sample_of_target == number
        at = packed.target_positions[own] - start
        assert np.array_equal(packed.target_ids[own], sample.labels[at])
        assert own.sum() == sample.meta.target_tokens and at.max() < stop - start - 1
    placeholders = [p.id for p in dataset.text.placeholders.values()]
    assert np.array_equal(packed.feature_positions, np.flatnonzero(np.isin(packed.input_ids, placeholders)))


def test_feature_positions_are_in_the_order_of_the_transfers_pieces(dataset):
    plan = make_plan(dataset, pipe=2)
    for batch in StepLoader(dataset, sampler(dataset), plan, 0, 0, 3):
        replica = batch.step_plan.replica_of(0)
        for index, packed in batch.packed.items():
            pieces = [p for t in replica.transfers for p in t.pieces if p.micro_batch == index]
            pieces.sort(key=lambda piece: piece.destination_start)
            starts = [np.arange(p.destination_start, p.destination_start + p.rows) for p in pieces]
            assert packed.feature_positions.tolist() == [int(i) for start in starts for i in start]


def test_an_empty_micro_batch(dataset):
    packed, _ = pack(dataset, MicroBatch(0))
    assert packed.cu_seqlens.tolist() == [0]
    assert packed.spans == ()
    arrays = {k: v for k, v in vars(packed).items() if k not in ("cu_seqlens", "spans")}
    assert all(len(v) == 0 and v.dtype == np.int64 for v in arrays.values())


def test_workers_change_nothing_and_no_random_number_is_drawn(dataset):
    plan = make_plan(dataset, pipe=2)
    alone = list(StepLoader(dataset, sampler(dataset), plan, 1, 0, 5))
    state = torch.get_rng_state()
    loader = StepLoader(dataset, sampler(dataset), plan, 1, 0, 5, num_workers=2)
    for batches in (list(loader), list(loader)):
        assert len(batches) == len(loader) == 5
        list(map(same, alone, batches))
    resumed = StepLoader(dataset, sampler(dataset), plan, 1, 3, 5, num_workers=1)
    list(map(same, alone[3:], resumed))
    assert torch.equal(torch.get_rng_state(), state)


def test_evaluation_takes_each_row_once(dataset):
    plan = make_plan(dataset)
    batches = list(EvalLoader(dataset, 10, plan, 0))
    assert [batch.step_plan.samples for batch in batches] == [10, 10, 5]
    assert all(batch.step_plan.forward_only for batch in batches)
    rows = [s.row for b in batches for r in b.step_plan.replicas for m in r.micro_batches for s in m.samples]
    assert sorted(rows) == list(range(25))
    (some,) = EvalLoader(dataset, 10, plan, 0, rows=[7, 3])
    assert some.step_plan.samples == 2


def test_a_medium_that_fails_leaves_zeros_and_a_reason(dataset, folder):
    whole = (folder / "b.png").read_bytes()
    (folder / "b.png").write_bytes(whole[:60])
    try:
        (batch,) = StepLoader(dataset, sampler(dataset), make_plan(dataset), 0, 0, 1)
    finally:
        (folder / "b.png").write_bytes(whole)
    broken = {row for row in sampler(dataset).rows(0) if row % 5 == 2}
    assert {row for row, _ in batch.failed} == broken and broken
    assert all("image file cannot be decoded" in reason for _, reason in batch.failed)
    zeros = [v for m in batch.media.values() for v in m.get("vision", []) if not v.any()]
    assert len(zeros) == len(broken) and all(value.shape == (3, 28, 28) for value in zeros)


def test_a_failed_sample_leaves_every_count(dataset):
    plan = make_plan(dataset, pipe=1, data=2)
    batch = next(iter(StepLoader(dataset, sampler(dataset), plan, 0, 0, 1)))
    step = batch.step_plan
    samples = [s for r in step.replicas for mb in r.micro_batches for s in mb.samples]
    failed = {samples[0].row, samples[-1].row}  # one on each replica: all ranks leave both out
    kept = [s for s in samples if s.row not in failed]
    made = prepare(batch, 0, failed, torch.device("cpu"))
    assert made.tokens == sum(s.tokens for s in kept) < step.tokens
    assert made.target_tokens == sum(s.target_tokens for s in kept) < step.target_tokens
    for mb in step.replica_of(0).micro_batches:
        lost = tuple(i for i, s in enumerate(mb.samples) if s.row in failed)
        assert made.batches[mb.index].lost == lost
    assert prepare(batch, 0, (), torch.device("cpu")).tokens == step.tokens


def test_a_row_that_changed_keeps_its_length_and_loses_its_targets(dataset, monkeypatch):
    (whole,) = StepLoader(dataset, sampler(dataset), make_plan(dataset), 0, 0, 1)
    row = sampler(dataset).rows(0)[0]
    find = dataset._find

    def moved(wanted):
        measurer, index, local = find(wanted)
        return (measurer, index, local) if wanted != row else (measurer, index, (local + 1) % 25)

    monkeypatch.setattr(
        type(dataset), "_read", lambda self, r: moved(r)[0].reader.read(moved(r)[0].source[moved(r)[2]])
    )
    dataset._make_caches()
    (batch,) = StepLoader(dataset, sampler(dataset), make_plan(dataset), 0, 0, 1)
    assert row in dict(batch.failed) and batch.step_plan.hash == whole.step_plan.hash
    for index, packed in batch.packed.items():
        assert len(packed.input_ids) == len(whole.packed[index].input_ids)
    lost = sum(len(p.target_ids) for p in whole.packed.values()) - sum(
        len(p.target_ids) for p in batch.packed.values()
    )
    assert lost == dataset.meta(row).target_tokens
