"""Blocks of layers: how a stage is cut, and that recomputing one changes nothing."""

import pytest
import torch
from torch import nn

from models.llm import DecoderLayer
from models.packed import PackedBatch, StageState
from omni_ds.engine.stage_layers import Block, blocks_of


class Layer(DecoderLayer):
    """A decoder layer in name: a linear map, a router loss, and something handed on to later layers."""

    def __init__(self, seed: int):
        nn.Module.__init__(self)
        torch.manual_seed(seed)
        self.linear, self.runs = nn.Linear(4, 4), 0

    def forward(self, state: StageState) -> StageState:
        self.runs += 1
        if None not in state.rotary:
            state.rotary[None] = (torch.full((4,), 2.0), torch.zeros(4))
        hidden = torch.tanh(self.linear(state.hidden)) * state.rotary[None][0]
        auxiliary = hidden.square().sum()
        if state.auxiliary is not None:
            auxiliary = state.auxiliary + auxiliary
        state = StageState(state.batch, hidden, state.rotary)
        state.auxiliary = auxiliary
        return state


def batch() -> PackedBatch:
    ids = torch.zeros(3, dtype=torch.int64)
    return PackedBatch(ids, ids, torch.tensor([0, 3], dtype=torch.int32), 3, (3,), ids[:0], ids[:0], ids[:0])


def run(size: int, layers: list[Layer]) -> tuple[torch.Tensor, ...]:
    """Output, router loss, and gradients of input and weights."""
    torch.manual_seed(0)
    hidden = torch.randn(3, 4, requires_grad=True)
    state = StageState(batch(), hidden)
    for block in blocks_of(layers, size):
        state = block(state)
    for layer in layers:
        layer.zero_grad()
    torch.autograd.backward([state.hidden.sum(), state.auxiliary])
    return state.hidden, state.auxiliary, hidden.grad, *(layer.linear.weight.grad for layer in layers)


@pytest.mark.parametrize("size", [2, 3, 5, 9])
def test_recomputed_blocks_change_nothing(size):
    layers = [Layer(seed) for seed in range(5)]
    expected = run(0, layers)
    assert [layer.runs for layer in layers] == [1] * 5
    for found, wanted in zip(run(size, layers), expected, strict=True):
        assert torch.equal(found, wanted)
    assert [layer.runs for layer in layers] == [3] * 5, "each layer ran again in the backward pass"


def test_nothing_is_recomputed_without_a_graph():
    layers = [Layer(0), Layer(1)]
    with torch.no_grad():
        Block(tuple(layers), recompute=True)(StageState(batch(), torch.zeros(3, 4)))
    assert [layer.runs for layer in layers] == [1, 1]


def test_a_stage_is_cut_by_decoder_layers():
    first, last = nn.Identity(), nn.Identity()
    layers = [first, *(Layer(seed) for seed in range(5)), last]
    cut = [(len(block.layers), block.recompute) for block in blocks_of(layers, 2)]
    assert cut == [(1, False), (2, True), (2, True), (1, True), (1, False)]
    assert all(len(block.layers) == 1 and not block.recompute for block in blocks_of(layers, 1))
