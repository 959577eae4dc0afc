"""Engines that sleep instead of computing, behind the same protocol as the real ones.

What travels has the real shape and values that say where it belongs: a feature row carries the tag of its
medium, every other token its position. Each stage checks what it receives, and gradients are the negated
values, so that a message in the wrong place stops the emulation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from models.encoders import ItemSlice
from models.packed import PackedBatch
from omni_ds.plan.actions import Action
from omni_ds.plan.build import Plan, StepPlan
from omni_ds.plan.reshard import PlacedItem
from omni_ds.plan.sample import Item

Duration = Callable[[int, Action], int]  # (rank, action) -> ns


def tags(item: Item) -> list[int]:
    """One number for each feature row of a medium, small enough to be exact in fp32."""
    return [1 + (7919 * item.row + 1013 * item.ordinal + i) % 65521 for i in range(item.rows)]


def expected_hidden(plan: Plan, step_plan: StepPlan, rank: int, micro_batch: int) -> Tensor:
    """[tokens, 1]: what flows through `rank`, its sequence shard: position, or tag of a feature row."""
    replica = step_plan.replica_of(rank)
    batch, shard = replica.micro_batches[micro_batch], step_plan.mesh.coords(rank).sequence
    bounds = replica.bounds(batch)
    values = torch.arange(bounds[-1], dtype=torch.float32) % 97
    for sample, start in zip(batch.samples, batch.cu_seqlens, strict=False):
        for item in sample.items:
            rows = iter(tags(item))
            for offset, length in item.spans:
                for i in range(length):
                    values[start + offset + i] = next(rows)
    return values[bounds[shard] : bounds[shard + 1], None]


class EmulatedLLM:
    """`LLMEngine` of one stage. duration: how long an action sleeps, in ns.

    Gradient reductions and the optimizer take no time; the joint norm is a real all-reduce over `group`.
    """

    trainable = True
    dtype = torch.float32

    def __init__(self, plan: Plan, rank: int, group: dist.ProcessGroup):
        self._plan, self._rank, self._group = plan, rank, group
        self._stage = plan.mesh.coords(rank).pipe
        self._first, self._last = self._stage == 0, self._stage == plan.mesh.pipe - 1
        self._action: Action | None = None
        self._live: dict[int, tuple[Tensor | None, PackedBatch]] = {}

    def begin(self, step_plan: StepPlan, duration: Duration) -> None:
        """Prepare for a step: what has to flow is computed before the clock starts."""
        self._duration = duration
        self._expected = [
            expected_hidden(self._plan, step_plan, self._rank, m) for m in range(step_plan.micro_batches)
        ]

    def run(self, actions: Sequence[Action], micro_batches: int, handler: Callable[[Action], None]) -> None:
        for action in actions:
            self._action = action
            handler(action)

    def forward(self, batch: PackedBatch, hidden: Tensor | None) -> tuple[Tensor, None]:
        index = self._action.index
        if not self._first:
            _check(hidden, self._message(batch, self._stage), self._action)
        elif batch.features is not None:
            _check(batch.features, self._expected[index][batch.feature_positions], self._action)
        output = None if self._last else self._wide(self._message(batch, self._stage + 1))
        self._live[index] = (hidden, batch)
        self._sleep()
        return torch.zeros(len(batch.target_ids)) if self._last else output, None

    def backward(self, output: Tensor, gradient: Tensor | None, auxiliary: None = None) -> None:
        index = self._action.index
        hidden, batch = self._live.pop(index)
        if gradient is not None:
            _check(gradient, -self._message(batch, self._stage + 1), self._action)
        if hidden is not None:
            hidden.grad = self._wide(-self._message(batch, self._stage))
        if batch.features is not None and batch.features.requires_grad:
            rows = -self._expected[index][batch.feature_positions]
            batch.features.grad = rows.expand(-1, self._plan.row_width).contiguous()
        self._sleep()

    def _message(self, batch: PackedBatch, stage: int) -> Tensor:
        """[tokens + levels * feature rows, 1]: what goes into a stage (`PackedBatch.media_positions`)."""
        expected, levels = self._expected[self._action.index], self._plan.levels_into(stage)
        return torch.cat([expected, *[expected[batch.media_positions]] * levels]) if levels else expected

    def _wide(self, values: Tensor) -> Tensor:
        return values.expand(-1, self._plan.llm.hidden).contiguous()

    def _sleep(self) -> None:
        time.sleep(self._duration(self._rank, self._action) / 1e9)

    def squared_norm(self) -> Tensor:
        total = torch.ones((), dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return total

    def train(self, mode: bool = True) -> None:
        pass

    def reduce_tied(self) -> None:
        pass

    def reduce(self) -> None:
        pass

    def step(self, norm: float, clip: float) -> None:
        assert not self._live, f"forwards without a backward: {sorted(self._live)}"

    def skip_step(self) -> None:
        raise AssertionError("the emulated norm is finite")


class EmulatedEncoders:
    """What the executor uses of `EncoderEngine`; features are tags."""

    def __init__(self, plan: Plan, rank: int):
        self._plan, self._rank = plan, rank
        self.trainable = plan.encoders_trainable
        inline = plan.options.placement == "first_stage"
        self.ranks = SimpleNamespace(size=plan.mesh.data if inline else plan.mesh.world_size)
        self._live: dict[Hashable, Tensor] = {}

    def begin(self, step_plan: StepPlan, duration: Duration) -> None:
        self._duration = duration
        windows = range(len(step_plan.replica_of(self._rank).windows))
        self._tags: dict[Hashable, Tensor] = {}
        for window in windows:
            shares = step_plan.shares(self._rank, window)
            self._tags[window] = _share_tags(shares[0][1].whole)
            for data, share in shares:
                for n, placed in enumerate(share.slices):
                    self._tags[window, data, n] = _share_tags([placed])

    def begin_step(self, backward_windows: Sequence[int]) -> None:
        pass

    def forward(
        self,
        window: int,
        media: Mapping[str, Sequence[Tensor]],
        rows: Mapping[str, int],
        passes: Sequence[str],
        keep_graph: bool,
        shapes: Mapping[str, Sequence[Sequence[int]]],
    ) -> Tensor:
        output = self._tags[window].expand(-1, self._plan.row_width).contiguous()
        self._live[window] = output
        time.sleep(self._duration(self._rank, Action.parse(f"EF{window}")) / 1e9)
        return output

    def forward_slice(
        self, key: Hashable, name: str, value: Tensor, part: ItemSlice, keep_graph: bool
    ) -> Tensor:
        """Its time is part of the window's."""
        dist.barrier(group=part.group)
        output = self._tags[key].expand(-1, self._plan.row_width).contiguous()
        self._live[key] = output
        return output

    def backward(self, window: Hashable, gradient: Tensor) -> None:
        """A window's, or of the slice of that key."""
        of_slice = isinstance(window, tuple)
        action = Action.parse(f"EB{window[0] if of_slice else window}")
        scale = self.ranks.size / self._plan.mesh.data_degree
        output = self._live.pop(window)
        _check(gradient, -self._tags[window] * scale, action)
        assert gradient.shape == output.shape
        if not of_slice:
            time.sleep(self._duration(self._rank, action) / 1e9)

    def squared_norm(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64)

    def train(self, mode: bool = True) -> None:
        pass

    def reduce(self) -> None:
        assert not self._live, f"windows without a backward: {sorted(self._live)}"

    def step(self, norm: float, clip: float) -> None:
        pass

    def discard_live(self) -> None:
        self._live.clear()


def _share_tags(items: Sequence[PlacedItem]) -> Tensor:
    """[rows, 1] in the order of the share's output."""
    values = [tag for placed in items for tag in tags(placed.item)]
    return torch.tensor(values, dtype=torch.float32).reshape(-1, 1)


def _check(received: Tensor, expected: Tensor, action: Action) -> None:
    """received: [rows, hidden]; expected: [rows, 1]."""
    rows = torch.nonzero((received != expected).any(dim=1)).flatten().tolist()
    assert received.shape[0] == expected.shape[0] and not rows, (
        f"{action}: rows {rows[:8]} of what arrived belong elsewhere"
    )
