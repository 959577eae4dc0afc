"""Estimated time of a step under a layout, in integer ns: enough to compare layouts, not to promise a speed.

Compute is FLOPs at a fixed share of the device's peak, on the LLM's 1F1B time line (base.time_line) with
even micro-batches; communication is bytes over the slowest link of its group plus a latency a message, added
to the pass it belongs to: nothing of it is overlapped. Encoders fill what the LLM's pipeline leaves idle, so
that a step takes the longer of the pipeline alone and all work dealt evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omni_ds.plan.base import LLMWork, time_line
from omni_ds.plan.cost import EncoderCost, backward_factor
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.hardware import Hardware
from omni_ds.plan.held import LayerShare, held_by_stage
from omni_ds.plan.llm_meta import LLMMeta
from omni_ds.plan.memory import encoder_parameters
from omni_ds.plan.plan import Plan
from omni_ds.plan.sample import SampleMeta
from omni_ds.plan.step import FILL

REACHED = 45  # percent of the peak that training reaches on large matrices
LATENCY = 20_000  # ns of a collective or a message, however small
NS = 10**9


@dataclass(frozen=True)
class Batch:
    """A global batch in sums over its samples. layer, head: forward FLOPs of one decoder layer and of the
    head; encoding: forward and backward FLOPs of all encoders; features: rows."""

    samples: int
    tokens: int
    layer: int
    head: int
    encoding: int
    features: int = 0

    @classmethod
    def of(
        cls, llm: LLMMeta, encoders: Sequence[EncoderMeta], samples: Sequence[SampleMeta], recompute: bool
    ) -> Batch:
        cost = EncoderCost(encoders, recompute)
        return cls(
            samples=len(samples),
            tokens=sum(sample.tokens for sample in samples),
            layer=llm.layer_flops([sample.tokens for sample in samples]),
            head=llm.head_flops(sum(sample.target_tokens for sample in samples)),
            encoding=sum(cost.total(item) for sample in samples for item in sample.items),
            features=sum(item.rows for sample in samples for item in sample.items),
        )


@dataclass(frozen=True)
class StepTime:
    """ns. compute: forwards, backwards and the messages in them, with bubbles; reduction: of gradients."""

    compute: int
    reduction: int
    micro_batches: int

    @property
    def total(self) -> int:
        return self.compute + self.reduction


def micro_batches_of(plan: Plan, batch: Batch) -> int:
    """How many micro-batches of each replica hold the batch (batch.assign)."""
    if plan.options.micro_batches is not None:
        return plan.options.micro_batches
    fill = FILL * plan.mesh.pipe if plan.mesh.pipe > 1 else 1
    data, budget = plan.mesh.data, plan.options.max_tokens_per_micro_batch
    return max(1, min(fill, -(-batch.samples // data)), -(-batch.tokens // (budget * data)))


def step_time(plan: Plan, batch: Batch, hardware: Hardware, element: int) -> StepTime:
    """Of one global batch. element: bytes of an activation, and of a gradient that is reduced."""
    count = micro_batches_of(plan, batch)
    passes = _Passes(plan, batch, hardware, element, count)
    forward, backward = passes.costs()
    stages, shown = len(plan.stages), min(count, 2 * len(plan.stages))
    work = LLMWork(tuple((f,) * shown for f in forward), tuple((b,) * shown for b in backward))
    # from then on every micro-batch adds what the dearest stage needs for it
    dearest = max(f + b for f, b in zip(forward, backward, strict=True))
    compute = time_line(work).length + (count - shown) * dearest
    if not plan.first_stage_only:
        encoding = passes.nanoseconds(passes.of_replica(batch.encoding), plan.mesh.lanes * stages)
        compute = max(compute, (sum(forward) + sum(backward)) * count // stages + encoding)
    return StepTime(compute, _reduction(plan, hardware, element, count), count)


class _Passes:
    """Forward and backward of an average micro-batch on every stage."""

    def __init__(self, plan: Plan, batch: Batch, hardware: Hardware, element: int, count: int):
        self.plan, self.batch, self.hardware = plan, batch, hardware
        self.element, self.count = element, count
        mesh = plan.mesh
        self.tensor_link = link(hardware, mesh.tensor)
        self.sequence_link = link(hardware, mesh.lanes)
        self.expert_link = link(hardware, mesh.expert * mesh.tensor)
        self.pipe_link = link(hardware, mesh.world_size)

    def of_replica(self, total: int) -> int:
        """The part of the replica with most samples."""
        samples = self.batch.samples
        return total * -(-samples // self.plan.mesh.data) // samples

    def nanoseconds(self, flops: int, ranks: int) -> int:
        return flops * NS * 100 // (self.hardware.peak_flops * REACHED * ranks)

    def costs(self) -> tuple[list[int], list[int]]:
        """ns of a forward and a backward, by stage."""
        plan, mesh, llm = self.plan, self.plan.mesh, self.plan.llm
        recompute, stages = plan.options.recompute, len(plan.stages)
        layer, head = self._layer(), self._head()
        of_kind = [self._messages(sparse) for sparse in (False, True)]
        messages = [of_kind[i in llm.moe_layers] for i in range(llm.layers)]
        hops = [self._message(plan.levels_into(s)) if s else 0 for s in range(stages)] + [0]
        ends = self._all_reduce() if mesh.tensor > 1 else 0  # of the embedding, and of the head's gradient
        encoding = 0
        if plan.first_stage_only:
            encoding = self.nanoseconds(self.of_replica(self.batch.encoding), mesh.lanes) // self.count
        forward, backward = [], []
        for s, (start, stop) in enumerate(plan.stages):
            body, moved = (stop - start) * layer, sum(messages[start:stop])
            top, last = head if s == stages - 1 else 0, s == stages - 1
            first = (s == 0) * (ends + encoding)
            forward.append(body + top + moved + first + hops[s])
            backward.append(
                body * backward_factor(llm, recompute)
                + top * (1 + llm.trainable)
                + moved * (1 + recompute)
                + last * ends
                + hops[s + 1]
            )
        return forward, backward

    def _layer(self) -> int:
        """ns of a layer's forward. Tensor ranks share attention and MLP, as evenly as heads go, and repeat
        experts."""
        llm, mesh, batch = self.plan.llm, self.plan.mesh, self.batch
        slots = llm.experts_per_token * llm.moe_intermediate * len(llm.moe_layers)
        repeated = min(batch.layer, 2 * 3 * llm.hidden * slots * batch.tokens // llm.layers)
        shared, heads = batch.layer - repeated, LayerShare.of(llm, mesh.tensor).heads
        flops = shared * heads // llm.heads + repeated
        return self.nanoseconds(self.of_replica(flops), self.count * mesh.sequence)

    def _head(self) -> int:
        return self.nanoseconds(self.of_replica(self.batch.head), self.count * self.plan.mesh.lanes)

    @property
    def _rows(self) -> int:
        """Tokens of a sequence shard of a micro-batch."""
        return self._of_shard(self.batch.tokens)

    def _of_shard(self, total: int) -> int:
        return -(-self.of_replica(total) // (self.count * self.plan.mesh.sequence))

    def _message(self, levels: int) -> int:
        rows = self._rows + levels * self._of_shard(self.batch.features)
        return transfer(rows * self.plan.llm.hidden * self.element, self.pipe_link)

    def _all_reduce(self) -> int:
        size, tensor = self._rows * self.plan.llm.hidden * self.element, self.plan.mesh.tensor
        return transfer(2 * size * (tensor - 1) // tensor, self.tensor_link)

    def _messages(self, moe: bool) -> int:
        """ns of the collectives in one direction of a layer, with experts or dense."""
        llm, mesh, rows = self.plan.llm, self.plan.mesh, self._rows
        total = 0
        if mesh.tensor > 1:
            total += self._all_reduce() * (1 if moe else 2)
        if mesh.sequence > 1:
            share = LayerShare.of(llm, mesh.tensor)
            size = rows * (2 * share.query + 2 * share.key) * self.element
            total += transfer(size * (mesh.sequence - 1) // mesh.sequence, self.sequence_link) + 3 * LATENCY
        if moe and mesh.expert > 1:
            size = 2 * rows * llm.experts_per_token * llm.hidden * self.element
            total += transfer(size * (mesh.expert - 1) // mesh.expert, self.expert_link) + LATENCY
        return total


def transfer(size: int, link_bytes: int) -> int:
    """ns of `size` bytes."""
    return LATENCY + size * NS // link_bytes


def link(hardware: Hardware, span: int) -> int:
    """bytes/s between ranks that lie within `span` neighbours."""
    return hardware.intra_bytes if span <= hardware.per_node else hardware.inter_bytes


def _reduction(plan: Plan, hardware: Hardware, element: int, count: int) -> int:
    """ns in which gradients are summed and new weights collected, of the stage with most."""
    mesh, options, slowest = plan.mesh, plan.options, 0
    between = link(hardware, mesh.data * mesh.lanes)
    for stage in range(mesh.pipe):
        held = held_by_stage(plan.llm, mesh, plan.stages, stage)
        time = 0
        for parameters, group in (
            (held.dense, mesh.data_degree),
            (held.experts, mesh.data_degree // mesh.expert),
        ):
            if parameters and group > 1 and plan.llm.trainable:
                rounds = (2, 3, count + 1, 3 * count)[options.llm_zero_stage]
                time += transfer(rounds * parameters * element * (group - 1) // group, between)
        trained, _ = encoder_parameters(plan, stage)
        if trained and mesh.world_size > 1:
            time += transfer(3 * trained * element, link(hardware, mesh.world_size))
        slowest = max(slowest, time)
    return slowest
