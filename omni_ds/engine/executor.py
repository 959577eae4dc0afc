"""Executes one step's actions on one rank. It decides nothing: order, shapes and peers come from the plan.

Scale, once and for all. The loss of a micro-batch is ``local_sum / target_tokens * D``: the LLM engine
averages gradients over the D data ranks, and we want their sum. The gradient arriving at a feature carries
that D, and the encoder engine averages over the ranks that share the encoders (the world, when colocated), so
it is multiplied by their number / D before EB.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from omni_ds.engine.encoder_engine import EncoderEngine
from omni_ds.engine.encoder_windows import EncoderWindows
from omni_ds.engine.llm_engine import sum_over_ranks
from omni_ds.engine.loss import target_scores
from omni_ds.engine.protocol import LLMEngine
from omni_ds.engine.reduction_clock import ReductionClock
from omni_ds.engine.step import StepInput, StepResult
from omni_ds.parallel.channel import Channel
from omni_ds.parallel.groups import ProcessGroups
from omni_ds.plan.actions import Action, Kind
from omni_ds.plan.build import Plan


@dataclass
class _Live:
    """A micro-batch between its F and its B."""

    hidden: Tensor | None
    features: Tensor | None
    output: Tensor
    auxiliary: Tensor | None = None


class StepExecutor:
    """Runs steps on this rank.

    Args:
        plan: the static plan.
        rank: global rank.
        llm, encoders: the two engines.
        groups: process groups.
        device: of this rank.
        clip: gradient clipping by the joint norm; 0 for none.
        after_step: called after the weights changed (learning rate schedules).
        gangs: size -> the block of neighbours this rank encodes slices of long items with.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        llm: LLMEngine,
        encoders: EncoderEngine,
        groups: ProcessGroups,
        device: torch.device,
        clip: float,
        after_step: Callable[[], None] = lambda: None,
        gangs: Mapping[int, ProcessGroup] | None = None,
    ):
        self._plan, self._rank = plan, rank
        self._gangs = gangs or {}
        self._llm, self._encoders = llm, encoders
        self._groups, self._device = groups, device
        self._clip, self._after_step = clip, after_step
        self._mode: bool | None = None
        where = plan.mesh.coords(rank)
        self._stage = where.pipe
        self._last_stage = self._stage == plan.mesh.pipe - 1
        self._counts_loss = where.tensor == 0  # tensor ranks compute the same losses
        self._activations = Channel(groups.activations, device, "activations")
        self._gradients = Channel(groups.gradients, device, "activation gradients")
        self._features = Channel(groups.features, device, "features")
        self._feature_gradients = Channel(groups.feature_gradients, device, "feature gradients")
        self._handlers: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.EF: self._encoder_forward,
            Kind.EB: self._encoder_backward,
            Kind.ER: lambda _: self._encoders.reduce(),
            Kind.SEND_F: self._send_activations,
            Kind.RECV_F: lambda a: self._post(self._activations, a),
            Kind.SEND_B: lambda a: self._gradients.send(self._hidden_gradients.pop(a.index), a.peer),
            Kind.RECV_B: lambda a: self._post(self._gradients, a),
            Kind.SEND_X: lambda a: self._windows.send(a.index, a.peer),
            Kind.RECV_X: lambda a: self._windows.own.post(a.index, a.peer),
            Kind.SEND_G: lambda a: self._windows.own.send_gradient(a.index, a.peer),
            Kind.RECV_G: lambda a: self._windows.post_gradient(a.index, a.peer),
            Kind.TIED: lambda _: self._llm.reduce_tied(),
            Kind.REDUCE: lambda _: self._llm.reduce(),
            Kind.NORM: self._norm,
            Kind.STEP: self._step,
        }

    def run(self, step: StepInput) -> StepResult:
        """Run all actions of one step; collective over the world."""
        plan = step.plan
        self._input = step
        self._train = not plan.forward_only
        self._windows = EncoderWindows(
            self._plan,
            step,
            self._rank,
            self._encoders,
            self._gangs,
            self._features,
            self._feature_gradients,
            self._llm.dtype,
            self._device,
        )
        self._live: dict[int, _Live] = {}
        self._hidden_gradients: dict[int, Tensor] = {}
        self._losses: list[Tensor] = []
        self._auxiliary: list[Tensor] = []
        self._result = StepResult(loss=0.0, target_tokens=step.target_tokens)
        self._reductions = ReductionClock(self._device, step.measure)
        actions = plan.actions(self._rank)
        sent_before, features_before = self._bytes_sent(), self._feature_bytes_sent()
        passes = plan.replica_of(self._rank).passes
        backward = [action.index for action in actions if action.kind is Kind.EB]
        self._encoders.begin_step([window for window in backward if passes[window]])
        self._set_mode(self._train)
        with torch.set_grad_enabled(self._train):
            self._llm.run(actions, plan.micro_batches, self._timed)
        for channel in self._channels():
            channel.flush()
        self._encoders.discard_live()
        sums = [_total(values, self._counts_loss) for values in (self._losses, self._auxiliary)]
        features = self._feature_bytes_sent() - features_before
        loss, auxiliary, features = sum_over_ranks([*sums, float(features)], self._groups.control)
        self._result.loss = loss / max(step.target_tokens, 1)
        self._result.auxiliary_loss = auxiliary / max(step.tokens, 1)
        self._result.feature_bytes = int(features)
        self._result.reduce_seconds = self._reductions.seconds()
        self._result.bytes_sent = self._bytes_sent() - sent_before
        result = self._result
        # Nothing of a step lives while the next one is prepared.
        del self._input, self._windows, self._result
        return result

    def _set_mode(self, train: bool) -> None:
        if self._mode is not train:
            self._encoders.train(train)
            self._llm.train(train)
            self._mode = train

    def _channels(self) -> tuple[Channel, ...]:
        return (self._activations, self._gradients, self._features, self._feature_gradients)

    def _bytes_sent(self) -> int:
        return sum(channel.bytes_sent for channel in self._channels())

    def _feature_bytes_sent(self) -> int:
        return self._features.bytes_sent + self._feature_gradients.bytes_sent

    def _timed(self, action: Action) -> None:
        self._began = time.perf_counter_ns()
        with self._reductions.around(action.kind):
            self._handlers[action.kind](action)
        self._result.times.append((action, self._began, time.perf_counter_ns()))

    @contextmanager
    def _clock(self, action: Action) -> Iterator[None]:
        """Measure the compute inside, without the waiting around it, in steps that ask for it."""
        if not self._input.measure:
            yield
            return
        synchronize(self._device)
        self._began = time.perf_counter_ns()
        yield
        synchronize(self._device)
        self._result.compute.append((action, time.perf_counter_ns() - self._began))

    def _post(self, channel: Channel, action: Action) -> None:
        """A message into this stage, or the gradient of one that left it."""
        levels = self._plan.levels_into(self._stage + (action.kind is Kind.RECV_B))
        rows = self._input.batches[action.index].message_rows(levels)
        channel.post(action.index, (rows, self._plan.llm.hidden), self._llm.dtype, action.peer)

    def _forward(self, action: Action) -> None:
        index = action.index
        batch = self._input.batches[index]
        hidden = features = None
        if self._stage > 0:
            hidden = self._activations.wait(index).requires_grad_(self._train)
        else:
            features = self._windows.own.features_of(index)
            if features is not None:
                features.requires_grad_(self._train and self._encoders.trainable)
                batch = replace(batch, features=features)
        if batch.tokens == 0:
            empty = torch.zeros((0, self._plan.llm.hidden), dtype=self._llm.dtype, device=self._device)
            self._live[index] = _Live(hidden, features, empty)
            return
        with self._clock(action):
            output, auxiliary = self._llm.forward(batch, hidden)
            if self._last_stage and not self._train:
                scores = target_scores(output)
                self._result.scores[index] = scores
                self._losses.append(scores.loss.double().sum())
                return
            if auxiliary is not None:
                self._auxiliary.append(auxiliary.detach().double())
                auxiliary = auxiliary * (self._plan.mesh.data_degree / max(self._input.tokens, 1))
            if self._last_stage:
                loss = output.sum()
                self._losses.append(loss.detach().double())
                output = loss * (self._plan.mesh.data_degree / max(self._input.target_tokens, 1))
        self._live[index] = _Live(hidden, features, output, auxiliary)

    def _send_activations(self, action: Action) -> None:
        live = self._live[action.index] if self._train else self._live.pop(action.index)
        self._activations.send(live.output, action.peer)

    def _backward(self, action: Action) -> None:
        index = action.index
        live = self._live.pop(index)
        empty = self._input.batches[index].tokens == 0
        gradient = None if self._last_stage else self._gradients.wait(index)
        if not empty:
            with self._clock(action):
                self._llm.backward(live.output, gradient, live.auxiliary)
        if live.hidden is not None:
            self._hidden_gradients[index] = live.hidden if empty else live.hidden.grad
        if live.features is not None and live.features.requires_grad:
            self._windows.own.store_gradient(index, live.features.grad)

    def _encoder_forward(self, action: Action) -> None:
        with self._clock(action):
            outputs = self._windows.forward(action.index, keep_graph=self._train)
        self._windows.keep(action.index, outputs)

    def _encoder_backward(self, action: Action) -> None:
        gradients = self._windows.gradients(action.index)
        with self._clock(action):
            self._windows.backward(action.index, gradients)

    def _norm(self, _: Action) -> None:
        # Both are asked for before one is read, which waits for the device (encoders on the first stage only
        # read theirs at once, to tell the others).
        squared = [self._llm.squared_norm(), self._encoders.squared_norm()]
        self._result.grad_norm = math.sqrt(sum(float(part) for part in squared))

    def _step(self, _: Action) -> None:
        # One decision for both engines; the norm is the same number on every rank.
        if math.isfinite(self._result.grad_norm):
            self._llm.step(self._result.grad_norm, self._clip)
            self._encoders.step(self._result.grad_norm, self._clip)
            self._after_step()
        else:
            self._result.skipped = True
            self._llm.skip_step()
            self._encoders.skip_step()


def _total(values: Sequence[Tensor], counts: bool) -> float:
    return float(torch.stack(list(values)).sum()) if values and counts else 0.0


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work, so that a clock read after it is meaningful."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
