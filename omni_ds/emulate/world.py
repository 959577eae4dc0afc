"""Emulated steps on forked ranks, timed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from models.packed import PackedBatch
from omni_ds.emulate.engines import EmulatedEncoders, EmulatedLLM
from omni_ds.emulate.fork import run_ranks
from omni_ds.engine import environment
from omni_ds.engine.executor import StepExecutor
from omni_ds.engine.step import StepInput
from omni_ds.engine.step_input import local_batch
from omni_ds.parallel.groups import ProcessGroups
from omni_ds.parallel.layer_groups import create_gangs
from omni_ds.plan.actions import Action
from omni_ds.plan.batch import MicroBatch
from omni_ds.plan.build import Plan, StepPlan
from omni_ds.plan.predict import StepCosts, predict
from omni_ds.plan.simulate import Simulation

Times = tuple[tuple[Action, int, int], ...]


@dataclass(frozen=True)
class Case:
    """A step to emulate. ns_per_teraflop: how long its work sleeps."""

    plan: Plan
    step: StepPlan
    ns_per_teraflop: int

    def duration(self, rank: int, action: Action) -> int:
        """ns."""
        return self._costs(rank, action) * self.ns_per_teraflop // 10**12

    @cached_property
    def _costs(self) -> StepCosts:
        return StepCosts(self.plan, self.step)

    def simulate(self) -> Simulation:
        """In ns; messages and the end of the step take no time."""
        return predict(self.plan, self.step, time=self.duration)


@dataclass(frozen=True)
class Emulated:
    """One run of a step. times: by rank, (action, start, end) in ns of one clock, waiting left out;
    bytes_sent: over all ranks."""

    times: tuple[Times, ...]
    bytes_sent: int

    @property
    def nanoseconds(self) -> int:
        """From the first action of any rank to the last."""
        return max(t[-1][2] for t in self.times) - min(t[0][1] for t in self.times)


def emulate(
    cases: Mapping[str, Case], repeats: int = 1, timeout: float = 300.0
) -> dict[str, tuple[Emulated, ...]]:
    """Run every case `repeats` times, in turn, on as many forked ranks as its mesh has.

    Raises:
        RankFailure: a rank failed or hung, for example because a message arrived in the wrong place.
    """
    (world,) = {case.plan.mesh.world_size for case in cases.values()}
    results = run_ranks(_run, world, cases, repeats, timeout=timeout)
    return {
        name: tuple(
            Emulated(tuple(r[name][i][0] for r in results), sum(r[name][i][1] for r in results))
            for i in range(repeats)
        )
        for name in cases
    }


def _run(cases: Mapping[str, Case], repeats: int) -> dict[str, list[tuple[Times, int]]]:
    """On every rank."""
    rank, device = dist.get_rank(), torch.device("cpu")
    mesh = next(iter(cases.values())).plan.mesh
    groups = ProcessGroups.create(mesh, environment.TIMEOUT)
    gangs = create_gangs(mesh, max(case.plan.largest_gang for case in cases.values()), environment.TIMEOUT)
    results: dict[str, list[tuple[Times, int]]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            llm = EmulatedLLM(case.plan, rank, groups.control)
            encoders = EmulatedEncoders(case.plan, rank)
            for engine in (llm, encoders):
                engine.begin(case.step, case.duration)
            executor = StepExecutor(case.plan, rank, llm, encoders, groups, device, clip=0.0, gangs=gangs)
            inputs = step_input(case.step, rank)
            dist.barrier(group=groups.control)
            result = executor.run(inputs)
            results[name].append((tuple(result.times), result.bytes_sent))
            time.sleep(0.05)  # let the last messages of slow ranks pass
    return results


def step_input(step: StepPlan, rank: int) -> StepInput:
    """The step's micro-batches with the planned shapes; token ids and targets are zeros."""
    replica, where = step.replica_of(rank), step.mesh.coords(rank)
    batches = {
        mb.index: local_batch(_packed(mb), replica.bounds(mb), where, replica.tensor)
        for mb in replica.micro_batches
    }
    windows = range(len(replica.windows))
    nothing = torch.empty(0)
    long_media = {
        window: [nothing for _, share in step.shares(rank, window) for _ in share.slices]
        for window in windows
    }
    return StepInput(
        plan=step,
        batches=batches,
        media={},
        target_tokens=step.target_tokens,
        tokens=step.tokens,
        measure=True,
        long_media=long_media,
    )


def _packed(batch: MicroBatch) -> PackedBatch:
    zeros = torch.zeros(batch.tokens, dtype=torch.int64)
    positions = [
        start + i
        for sample, start in zip(batch.samples, batch.cu_seqlens, strict=False)
        for i in range(sample.target_tokens)
    ]
    return PackedBatch(
        input_ids=zeros,
        position_ids=zeros,
        cu_seqlens=torch.tensor(batch.cu_seqlens, dtype=torch.int32),
        max_seqlen=batch.max_seqlen,
        segments=batch.lengths,
        target_positions=torch.tensor(positions, dtype=torch.int64),
        target_ids=torch.zeros(len(positions), dtype=torch.int64),
        sample_of_target=torch.zeros(len(positions), dtype=torch.int64),
        feature_positions=torch.tensor(_features(batch), dtype=torch.int64),
    )


def _features(batch: MicroBatch) -> list[int]:
    return sorted(
        start + offset + i
        for sample, start in zip(batch.samples, batch.cu_seqlens, strict=False)
        for item in sample.items
        for offset, length in item.spans
        for i in range(length)
    )
