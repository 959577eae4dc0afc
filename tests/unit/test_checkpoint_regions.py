"""Checkpoints of random layouts, read by ranks of other random layouts."""

from __future__ import annotations

import json
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from models.parameters import HeldParameter
from omni_ds.checkpoint import fill as filling
from omni_ds.checkpoint.fragments import WEIGHT
from omni_ds.checkpoint.overlap import Piece, covers, meetings
from omni_ds.checkpoint.state import EngineState, _merge, _write_engine
from omni_ds.errors import UserError
from omni_ds.plan.region import Region

STATES = ("exp_avg", "exp_avg_sq")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """cuts[name][tensor rank]: the regions it holds; ``data`` ranks share each, by ZeRO or as copies."""

    cuts: dict[str, tuple[tuple[Region, ...], ...]]
    data: int
    sharded: bool


def _bounds(draw, size: int, parts: int) -> list[int]:
    return [0, *sorted(draw(st.integers(0, size)) for _ in range(parts - 1)), size]


def _cut(draw, shape: Shape, tensor: int) -> tuple[tuple[Region, ...], ...]:
    """One parameter's regions on each tensor rank: copies, rows, columns, or columns of both halves."""
    whole = Region.whole(shape)
    kinds = ["copies", "rows"] + (["columns", "halves"] if len(shape) > 1 else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "copies":
        return ((whole,),) * tensor
    dim = 0 if kind == "rows" else 1
    size = shape[dim]
    sections = [(0, size // 2), (size // 2, size)] if kind == "halves" else [(0, size)]
    cut: list[tuple[Region, ...]] = [()] * tensor
    for start, stop in sections:
        bounds = _bounds(draw, stop - start, tensor)
        for rank in range(tensor):
            part = Region.of(shape, dim, start + bounds[rank], start + bounds[rank + 1])
            if part.elements:  # no layer holds an empty parameter
                cut[rank] += (part,)
    return tuple(cut)


@st.composite
def layouts(draw, shapes: dict[str, Shape]) -> Layout:
    tensor = draw(st.integers(1, 3))
    cuts = {name: _cut(draw, shape, tensor) for name, shape in shapes.items()}
    return Layout(cuts, draw(st.integers(1, 4)), draw(st.booleans()))


shapes_of_models = st.lists(
    st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3
).map(lambda shapes: {f"p{number}.weight": shape for number, shape in enumerate(shapes)})


def _values(name: str, shape: Shape, key: str) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {key}".encode()))
    return torch.randn(shape, generator=generator)


def _local(name: str, region: Region, key: str) -> Tensor:
    matrix = _values(name, region.shape, key).view(Region.whole(region.shape).height, -1)
    return matrix[slice(*region.rows), slice(*region.columns)].contiguous()


def _zero(held: list[HeldParameter], inner: torch.optim.Optimizer, rank: int, degree: int) -> object:
    """What DeepSpeed's ZeRO-1 makes of a group: one flat buffer, padded and cut evenly."""
    parameters = [h.parameter for h in held]
    size = -(-sum(p.numel() for p in parameters) // degree)
    flat = torch.zeros(size, requires_grad=True)
    inner.param_groups[0]["params"] = [flat]
    start = 0
    for parameter in parameters:
        first, last = max(start, rank * size), min(start + parameter.numel(), (rank + 1) * size)
        if first < last:
            parameter._hp_mapping = SimpleNamespace(
                param_group_index=0,
                lp_fragment_address=SimpleNamespace(start=first - start, numel=last - first),
                hp_fragment_address=SimpleNamespace(start=first - rank * size, numel=last - first),
            )
        start += parameter.numel()
    optimizer = DeepSpeedZeroOptimizer.__new__(DeepSpeedZeroOptimizer)
    optimizer.optimizer, optimizer.single_partition_of_fp32_groups = inner, [flat]
    return optimizer


def engines(layout: Layout) -> list[EngineState]:
    """The engine of every rank, without values."""
    found = []
    tensor = len(next(iter(layout.cuts.values())))
    for data in range(layout.data):
        for rank in range(tensor):
            held = [
                HeldParameter(name, nn.Parameter(torch.zeros(region.local_shape)), region)
                for name, regions in layout.cuts.items()
                for region in regions[rank]
            ]
            earlier = {
                (name, region)
                for name, regions in layout.cuts.items()
                for other in regions[:rank]
                for region in other
            }
            owned = {(h.name, h.region) for h in held} - earlier
            if not held:
                continue
            optimizer: object = torch.optim.AdamW([{"params": [h.parameter for h in held], "name": "llm"}])
            if layout.sharded:
                optimizer = _zero(held, optimizer, data, layout.data)
            elif data:
                owned = set()
            found.append(EngineState("llm", optimizer, held, lambda: None, owned))
    return found


def _set_values(engine: EngineState) -> None:
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for fragment in engine.fragments():
        state = inner.state[fragment.stepped]
        for key in STATES:
            state.setdefault(key, torch.zeros_like(fragment.stepped.data))
        state["step"] = torch.tensor(7.0)
    for fragment in engine.fragments():
        for key, target in fragment.tensors.items():
            local = _local(fragment.name, fragment.region, key).view(-1)
            target.copy_(local[fragment.offset : fragment.offset + fragment.length])


def written(layout: Layout, folder: Path) -> dict:
    """The index table of a checkpoint of ``layout`` in ``folder``."""
    manifests = []
    for rank, engine in enumerate(engines(layout)):
        _set_values(engine)
        manifests.append(_write_engine(folder, engine, rank))
    return json.loads(json.dumps(_merge(manifests)))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_layout_reads_any_other(data) -> None:
    shapes = data.draw(shapes_of_models)
    source, target = data.draw(layouts(shapes)), data.draw(layouts(shapes))
    with tempfile.TemporaryDirectory() as folder:
        stored = written(source, Path(folder))
        for engine in engines(target):
            filling.fill(Path(folder), engine.optimizer, engine.held, stored)
            for fragment in engine.fragments():
                assert fragment.tensors.keys() == {WEIGHT, *STATES} and fragment.scalars == {"step": 7.0}
                for key, got in fragment.tensors.items():
                    local = _local(fragment.name, fragment.region, key).view(-1)
                    expected = local[fragment.offset : fragment.offset + fragment.length]
                    assert torch.equal(got, expected), (fragment.name, key)


@settings(deadline=None)
@given(st.data())
def test_every_element_is_found_once_in_its_place(data) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    shapes = {"p": shape}
    numbers = torch.arange(Region.whole(shape).elements).view(Region.whole(shape).height, -1)

    def pieces(layout: Layout) -> list[Piece]:
        found = []
        for region in dict.fromkeys(region for regions in layout.cuts["p"] for region in regions):
            bounds = _bounds(data.draw, region.elements, layout.data)
            pairs = zip(bounds, bounds[1:], strict=False)
            found += [Piece(region, start, stop - start) for start, stop in pairs if start < stop]
        return found

    def flat(piece: Piece) -> Tensor:
        matrix = numbers[slice(*piece.region.rows), slice(*piece.region.columns)]
        return matrix.reshape(-1)[piece.offset : piece.offset + piece.length]

    stored = pieces(data.draw(layouts(shapes)))
    for wanted in pieces(data.draw(layouts(shapes))):
        reads = torch.zeros(wanted.length, dtype=torch.int64)
        windows = []
        for piece in stored:
            for into, source in meetings(wanted, piece):
                assert torch.equal(into.view(flat(wanted)), source.view(flat(piece)))
                into.view(reads).add_(1)
                windows.append(into)
        assert bool((reads == 1).all())
        assert covers(wanted.length, windows)
        assert not covers(wanted.length, windows[1:]) and not covers(wanted.length, [*windows, windows[0]])


def test_a_gap_that_an_overlap_balances_is_seen() -> None:
    wanted = Piece(Region.whole((4,)), 0, 4)
    twice = Piece(Region.whole((4,)), 0, 2)
    windows = [window for piece in (twice, twice) for window, _ in meetings(wanted, piece)]
    assert not covers(4, windows)


ROWS = {"p": tuple((Region.of((4, 6), 0, 2 * r, 2 * r + 2),) for r in range(2))}
COLUMNS = {"p": tuple((Region.of((4, 6), 1, 3 * r, 3 * r + 3),) for r in range(2))}


def test_a_missing_piece_is_an_error(tmp_path: Path) -> None:
    stored = written(Layout(ROWS, 2, True), tmp_path)
    del stored["parameters"]["p"]["pieces"][1]
    engine = engines(Layout(COLUMNS, 1, False))[0]
    with pytest.raises(UserError, match="not all there exactly once"):
        filling.fill(tmp_path, engine.optimizer, engine.held, stored)


def test_only_the_needed_range_is_read(tmp_path: Path, monkeypatch) -> None:
    stored = written(Layout({"p": ((Region.whole((4, 6)),),)}, 1, True), tmp_path)
    ranges = []

    def reader(folder: Path) -> filling.Reader:
        read = real(folder)

        def counting(file: str, name: str, part: slice) -> Tensor:
            ranges.append((part.start, part.stop))
            return read(file, name, part)

        return counting

    real = filling._reader
    monkeypatch.setattr(filling, "_reader", reader)
    engine = engines(Layout(ROWS, 1, False))[1]
    filling.fill(tmp_path, engine.optimizer, engine.held, stored)
    assert ranges == [(12, 24)] * 3, "one read for the weight and each moment"


def test_another_shape_is_an_error(tmp_path: Path) -> None:
    stored = written(Layout(ROWS, 1, True), tmp_path)
    engine = engines(Layout({"p": ((Region.whole((4, 5)),),)}, 1, True))[0]
    with pytest.raises(UserError, match=r"\(4, 6\) in the checkpoint, \(4, 5\) in the model"):
        filling.fill(tmp_path, engine.optimizer, engine.held, stored)


def test_regions_that_leave_a_hole_are_not_published(tmp_path: Path) -> None:
    engine = engines(Layout(ROWS, 1, True))[0]
    _set_values(engine)
    with pytest.raises(UserError, match=r"12 elements of p \[4, 6\]"):
        _merge([_write_engine(tmp_path, engine, 0)])
