"""Runs the cases of benchmarks/multi_gpu.py: all variants of all workloads, several times."""

from __future__ import annotations

import argparse
import statistics
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from benchmarks.parts.idle import Account, Measured, account, planned_ns, replayed_ns
from benchmarks.parts.variants import LAYOUTS, MODELS, VARIANTS, Case, built, even_group_counts, plan_case
from benchmarks.parts.workloads import AUDIO, draw_samples, model_flops, now, step_input
from omni_ds.composition import mesh_of
from omni_ds.engine import environment
from omni_ds.engine.runtime import Runtime
from omni_ds.engine.timing import model_keys, observe
from omni_ds.layout import numerics_of
from omni_ds.parallel.groups import ProcessGroups
from omni_ds.plan.activations import Load
from omni_ds.plan.build import StepPlan, build_step
from omni_ds.plan.memory import largest
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.times import TimeModel, fit

FILLED = 0.8  # of the token budget, on average
ROOM = 0.95  # of a GPU's memory, at most, by prediction


@dataclass
class Entry:
    """A case and what is known of it; rank 0 knows most."""

    case: Case
    step: StepPlan | None = None
    found: Account | None = None
    measured: Measured | None = None
    predicted: int = 0  # bytes, at the peak
    planned: float = 0.0  # seconds
    replayed: float = 0.0
    seconds: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    sent: float = 0.0
    features: float = 0.0

    def row(self, ceiling: float) -> dict:
        case, step = self.case, self.step
        middle = statistics.median(self.seconds)
        return {
            "model": case.model,
            "layout": case.layout,
            "variant": case.variant,
            "workload": case.workload,
            "stages": [stop - start for start, stop in case.plan.stages],
            "micro_batches": step.micro_batches,
            "tokens": step.tokens,
            "seconds": middle,
            "seconds_all": self.seconds,
            "spread": (max(self.seconds) - min(self.seconds)) / middle,
            "tokens_per_second": step.tokens / middle,
            "mfu": model_flops(case.plan, case.samples) / middle / ceiling,
            "planned_seconds": self.planned,
            "measured_step_seconds": self.found.length / 1e9,
            "replayed_seconds": self.replayed,
            "idle": self.found.idle,
            "shares": self.found.shares,
            "peak_gib": max(self.peaks),
            "predicted_gib": self.predicted / 2**30,
            "megabytes_sent": self.sent / 1e6,
            "feature_megabytes": self.features / 1e6,
            "loss": self.losses[0],
            "loss_range": [min(self.losses), max(self.losses)],
            "norm_range": [min(self.norms), max(self.norms)],
        }


class Bench:
    """All cases of a run. ceiling: FLOP/s of all devices together."""

    def __init__(self, options: argparse.Namespace, device: torch.device, ceiling: float):
        self.options, self.device, self.ceiling = options, device, ceiling
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.entries: list[Entry] = []
        self._groups: dict[Mesh, ProcessGroups] = {}
        self._resident: dict[tuple, Runtime] = {}
        self._stack = ExitStack()

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def plan(self, models: list[str], layouts: list[str], variants: list[str], workloads: list[str]) -> None:
        """Plan every case that there is of these."""
        options = self.options
        tokens = int(FILLED * options.budget * options.per_rank * self.world)
        for model in models:
            drawn = {}
            for layout in layouts:
                for workload in workloads:
                    if workload == AUDIO and "audio" not in MODELS[model]:
                        continue
                    for name in variants:
                        if not VARIANTS[name].fits(LAYOUTS[layout]):
                            continue
                        if workload not in drawn:
                            drawn[workload] = draw_samples(
                                workload, self._metas(model), tokens, options.budget, options.seed
                            )
                        entry = Entry(plan_case(model, layout, name, workload, drawn[workload], options))
                        if self._has_room(entry):
                            self.entries.append(entry)

    def _has_room(self, entry: Entry) -> bool:
        """Whether a GPU can hold the case by the plan's prediction; the same on every rank. Says so if not: a
        rank that runs out of memory would end the whole run."""
        case = entry.case
        step = _planned(case, None)
        plan, window = case.plan, max(len(members) for members in step.replicas[0].members)
        if plan.options.placement == "colocated":  # as many windows as the schedule lets live
            live = min(step.micro_batches, window * step.replicas[0].live)
            plan = replace(plan, options=replace(plan.options, live_micro_batches=live))
        numerics = numerics_of(case.config, fused=self.device.type == "cuda")
        entry.predicted = largest(plan, Load.of(step), numerics).peak
        room = environment.smallest_device().memory
        if room is None or entry.predicted < ROOM * room:
            return True
        self.say(
            f"left out: {case.model} {case.layout} {case.workload} {case.variant} is predicted to need "
            f"{entry.predicted / 2**30:.0f} GiB of {room / 2**30:.0f}; try --recompute, or a smaller --budget"
        )
        return False

    def _metas(self, model: str):
        """Encoders of a model in numbers."""
        return plan_case(model, "dp", "ours", AUDIO, (), self.options).plan.encoders

    def repeat(self, repetition: int) -> None:
        """Build, run and tear down everything once, in an order of this repetition."""
        by_build: dict[tuple, list[Entry]] = {}
        for entry in self.entries:
            by_build.setdefault(entry.case.build_key, []).append(entry)
        for key, entries in _turned(list(by_build.items()), repetition):
            case = max(entries, key=lambda entry: entry.case.plan.largest_gang).case
            groups = self._groups_of(mesh_of(case.config, self.world))
            with self._engines(key, case, groups) as runtime:
                if any(entry.step is None for entry in entries):
                    self._prepare(runtime, entries)
                for entry in _turned(entries, repetition):
                    self._time(runtime, entry)
                    if entry.found is None:
                        self._account(runtime, entry)

    def _engines(self, key: tuple, case: Case, groups: ProcessGroups) -> AbstractContextManager[Runtime]:
        if not self.options.resident:
            return built(case, groups, self.device)
        if key not in self._resident:
            self._resident[key] = self._stack.enter_context(built(case, groups, self.device))
        return nullcontext(self._resident[key])

    def _groups_of(self, mesh: Mesh) -> ProcessGroups:
        if mesh not in self._groups:
            even_group_counts()
            self._groups[mesh] = ProcessGroups.create(mesh, environment.TIMEOUT)
        return self._groups[mesh]

    def _prepare(self, runtime: Runtime, entries: list[Entry]) -> None:
        """Measure each case, fit one time model for all, plan with it."""
        observations = []
        for entry in entries:
            plan = entry.case.plan
            entry.step = _planned(entry.case, None)
            inputs = self._input(entry)
            runtime.executor.run(inputs)
            result = runtime.executor.run(replace(inputs, measure=True))
            observations += [observe(plan, entry.step, self.rank, a, ns) for a, ns in result.compute]
        rows = self._gathered(observations)
        box = [fit([one for each in rows for one in each], 0) if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0, group=runtime.groups.control)
        (self._model,) = box
        keys = [key for key, _ in model_keys(entries[0].case.plan)]
        assert self._model.covers(keys), f"no times of {set(keys) - self._model.coefficients.keys()}"
        for entry in entries:
            variant = VARIANTS[entry.case.variant]
            if variant.retimed and entry.case.plan.mesh.pipe > 1:
                entry.step = _planned(entry.case, self._model)

    def _input(self, entry: Entry):
        case = entry.case
        return step_input(case.plan, entry.step, case.samples, self.rank, self.device)

    def _time(self, runtime: Runtime, entry: Entry) -> None:
        inputs, executor, seconds = self._input(entry), runtime.executor, []
        control = runtime.groups.control
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        for number in range(1 + self.options.steps):
            dist.barrier(group=control)
            start = now(self.device)
            result = executor.run(inputs)
            now(self.device)
            dist.barrier(group=control)
            if number:  # the first warms up
                seconds.append(now(self.device) - start)
            entry.losses.append(result.loss)
            entry.norms.append(result.grad_norm)
        entry.seconds.append(statistics.median(seconds))
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else 0.0
        reports = self._gathered((result.bytes_sent, peak))
        entry.sent, entry.features = sum(sent for sent, _ in reports or ()), result.feature_bytes
        entry.peaks.append(max((peak for _, peak in reports or ()), default=0.0))
        case = entry.case
        self.say(
            f"{case.model:9}{case.layout:8}{case.workload:16}{case.variant:16}{entry.seconds[-1]:9.3f} s"
            f"{entry.step.tokens / entry.seconds[-1]:10.0f} tok/s   loss {result.loss:.5f} "
            f"norm {result.grad_norm:.4f}"
        )

    def _account(self, runtime: Runtime, entry: Entry) -> None:
        """One measured step, and what was planned for it."""
        inputs = replace(self._input(entry), measure=True)
        dist.barrier(group=runtime.groups.control)
        result = runtime.executor.run(inputs)
        end = int(now(self.device) * 1e9)  # the update runs on while the host is done
        last, start, _ = result.times[-1]
        times = [*result.times[:-1], (last, start, max(end, start))]
        everyone = self._gathered((times, dict(result.compute)))
        if self.rank != 0:
            entry.found = Account({}, {}, 0)
            return
        plan = entry.case.plan
        entry.measured = Measured(*zip(*everyone, strict=True))
        entry.found = account(plan, entry.step, entry.measured)
        entry.planned = planned_ns(plan, entry.step, self._model, entry.found.durations) / 1e9
        entry.replayed = replayed_ns(plan, entry.step, entry.found) / 1e9

    def _gathered(self, value) -> list:
        """By rank, on rank 0."""
        found: list = [None] * self.world
        dist.gather_object(value, found if self.rank == 0 else None, dst=0, group=self._control)
        return found if self.rank == 0 else []

    @property
    def _control(self) -> dist.ProcessGroup:
        return next(iter(self._groups.values())).control

    def rows(self) -> list[dict]:
        return [entry.row(self.ceiling) for entry in self.entries] if self.rank == 0 else []


def _planned(case: Case, times: TimeModel | None) -> StepPlan:
    variant = VARIANTS[case.variant]
    step = build_step(case.plan, 0, case.samples, times=times)
    return step if variant.policy is None else variant.policy(case.plan, step)


def _turned(values: list, by: int) -> list:
    """Begins elsewhere in every repetition."""
    shift = by % len(values) if values else 0
    return values[shift:] + values[:shift]
