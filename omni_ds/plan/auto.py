"""Degrees that the configuration leaves "auto": the fastest layout that fits the devices' memory.

Every legal layout is planned, its memory predicted (memory.py, for a micro-batch as large as the token budget
allows) and its step estimated (step_time.py, for a typical batch). Of those that fit with a tenth of the
memory to spare the fastest wins; among those within 2 % of it the one with the fewest axes in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from omni_ds.errors import UserError
from omni_ds.plan.activations import Load
from omni_ds.plan.build import build_plan
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.hardware import GIB, Hardware
from omni_ds.plan.llm_meta import LLMMeta
from omni_ds.plan.memory import Numerics, RankMemory, largest
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.plan import PlanOptions
from omni_ds.plan.sample import SampleMeta
from omni_ds.plan.step_time import Batch, StepTime, micro_batches_of, step_time
from omni_ds.plan.tensor_rules import largest_tensor_degree

RESERVE = 10  # percent of the memory kept for fragments, kernels' workspaces and the libraries
TIE = 2  # percent
_SHOWN, _REFUSED = 5, 3


@dataclass(frozen=True)
class Degrees:
    """What the configuration asks for; None: to be chosen."""

    pipe: int | None = None
    tensor: int | None = None
    sequence: int | None = None
    expert: int | None = None


@dataclass(frozen=True)
class Candidate:
    mesh: Mesh
    memory: RankMemory
    time: StepTime

    @property
    def axes(self) -> tuple[int, int]:
        """Axes in use, and the ranks of a replica: the fewer, the simpler."""
        mesh = self.mesh
        used = sum(n > 1 for n in (mesh.pipe, mesh.tensor, mesh.sequence, mesh.expert))
        return used, mesh.pipe * mesh.lanes * mesh.expert


@dataclass(frozen=True)
class Choice:
    """fits: layouts that fit, the chosen one first, then by time; too_large: the others by time."""

    fits: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    hardware: Hardware

    @property
    def mesh(self) -> Mesh:
        return self.fits[0].mesh

    def __str__(self) -> str:
        """The best few layouts, and the fastest of those that do not fit."""
        usable = _usable(self.hardware)
        limit = "" if usable is None else f", {usable / GIB:.4g} GiB of it to be used"
        lines = [
            f"layout chosen for {self.hardware}{limit}",
            f"  {'pipeline':>8}  {'data':>5}  {'sequence':>8}  {'tensor':>6}  {'expert':>6}  {'GiB':>8}  "
            f"{'s a step':>9}",
        ]
        for i, candidate in enumerate(self.fits[:_SHOWN]):
            lines.append(_row(candidate) + ("  chosen" if i == 0 else ""))
        lines += [_row(candidate) + "  does not fit" for candidate in self.too_large[:_REFUSED]]
        more = len(self.fits) + len(self.too_large) - (len(lines) - 2)
        if more > 0:
            lines.append(f"  and {more} more")
        return "\n".join(lines)


def _row(candidate: Candidate) -> str:
    mesh = candidate.mesh
    return (
        f"  {mesh.pipe:>8}  {mesh.data:>5}  {mesh.sequence:>8}  {mesh.tensor:>6}  {mesh.expert:>6}  "
        f"{candidate.memory.peak / GIB:>8.2f}  {candidate.time.total / 10**9:>9.3g}"
    )


def _usable(hardware: Hardware) -> int | None:
    return None if hardware.memory is None else hardware.memory * (100 - RESERVE) // 100


def choose(
    llm: LLMMeta,
    encoders: Sequence[EncoderMeta],
    options: PlanOptions,
    world_size: int,
    asked: Degrees,
    hardware: Hardware,
    numerics: Numerics,
    samples: Sequence[SampleMeta],
) -> Choice:
    """The layouts of `world_size` ranks that keep what is asked for.

    samples: a typical global batch. UserError when no layout is legal, or none fits.
    """
    batch = Batch.of(llm, encoders, samples, options.encoder_recompute)
    meshes = list(legal_meshes(llm, options, world_size, asked, hardware.per_node, len(samples)))
    if not meshes:
        raise UserError(_none_legal(world_size, asked))
    candidates, cut = [], {}
    for mesh in meshes:
        if mesh.pipe not in cut:  # layers are cut alike whatever the other axes
            cut[mesh.pipe] = build_plan(llm, tuple(encoders), mesh, options)
        plan = replace(cut[mesh.pipe], mesh=mesh)
        load = full_load(plan.encoders, batch, samples, micro_batches_of(plan, batch), mesh.data, options)
        memory = largest(plan, load, numerics)
        candidates.append(Candidate(mesh, memory, step_time(plan, batch, hardware, numerics.element)))
    candidates.sort(key=lambda c: (c.time.total, c.axes, c.mesh.shape))
    usable = _usable(hardware)
    fits = [c for c in candidates if usable is None or c.memory.peak <= usable]
    if not fits:
        raise UserError(_none_fits(min(candidates, key=lambda c: (c.memory.peak, c.axes)), hardware))
    near = [c for c in fits if c.time.total * 100 <= fits[0].time.total * (100 + TIE)]
    best = min(near, key=lambda c: (c.axes, c.time.total))
    others = tuple(c for c in fits if c is not best)
    return Choice((best, *others), tuple(c for c in candidates if c not in fits), hardware)


def full_load(
    encoders: Sequence[EncoderMeta],
    batch: Batch,
    samples: Sequence[SampleMeta],
    micro_batches: int,
    data: int,
    options: PlanOptions,
) -> Load:
    """The largest micro-batch there may be: the token budget, or all that a replica gets; every token a
    target, media as in the samples."""
    most = min(options.max_tokens_per_micro_batch, _largest_share(samples, data))
    loads = {}
    for meta in encoders:
        items = [item for s in samples for item in s.items if item.encoder == meta.name]
        tokens = sum(sum(item.segments) for item in items)
        rows = sum(item.rows for item in items)
        loads[meta.name] = tuple(-(-count * most // max(1, batch.tokens)) for count in (tokens, rows))
    return Load(micro_batches, most, most, sum(rows for _, rows in loads.values()), loads)


def _largest_share(samples: Sequence[SampleMeta], data: int) -> int:
    longest = sorted((sample.tokens for sample in samples), reverse=True)
    return sum(longest[: -(-len(longest) // data)])


def legal_meshes(
    llm: LLMMeta,
    options: PlanOptions,
    world_size: int,
    asked: Degrees,
    per_node: int,
    samples: int,
) -> Iterator[Mesh]:
    """Layouts that can work. Of chosen degrees, tensor ranks stay in a node, sequence ranks have a query
    head each, and every replica has a sample."""
    widest = min(per_node, largest_tensor_degree(llm)) if llm.heads % llm.kv_heads == 0 else 1
    for pipe in _degrees(asked.pipe, world_size, llm.layers if options.llm_zero_stage < 2 else 1):
        for tensor in _degrees(asked.tensor, world_size // pipe, widest):
            left = world_size // (pipe * tensor)
            for sequence in _degrees(asked.sequence, left, max(1, llm.heads // tensor)):
                data = left // sequence
                if data > samples or data % (options.group_size or 1):
                    continue
                for expert in _degrees(asked.expert, left, llm.experts or 1):
                    if expert == 1 or (llm.experts and llm.experts % expert == 0):
                        yield Mesh(pipe, data, sequence, tensor, expert)


def _degrees(asked: int | None, ranks: int, most: int) -> list[int]:
    """Divisors of `ranks` up to `most`; what is asked for, where it divides."""
    if asked is not None:
        return [asked] if ranks % asked == 0 else []
    return [n for n in range(1, min(ranks, most) + 1) if ranks % n == 0]


def _none_legal(world_size: int, asked: Degrees) -> str:
    given = {
        "pipeline.stages": asked.pipe,
        "tensor_parallel.autotp_size": asked.tensor,
        "sequence_parallel_size": asked.sequence,
        "expert_parallel.autoep_size": asked.expert,
    }
    named = ", ".join(f"{key} {value}" for key, value in given.items() if value is not None)
    return (
        f"no layout of {world_size} processes is possible with {named or 'all degrees auto'}; set more of "
        'these to "auto", raise train_batch_size to at least the number of replicas, or start another number '
        "of processes"
    )


def _none_fits(closest: Candidate, hardware: Hardware) -> str:
    mesh = closest.mesh
    return (
        f"no layout of {mesh.world_size} ranks fits {_usable(hardware) / GIB:.3g} GiB ({100 - RESERVE} % of "
        f"a device's {hardware.memory / GIB:.3g}); the closest, pipeline.stages {mesh.pipe}, "
        f"tensor_parallel.autotp_size {mesh.tensor}, sequence_parallel_size {mesh.sequence}, "
        f"expert_parallel.autoep_size {mesh.expert}, needs {closest.memory.peak / GIB:.3g} GiB: start more "
        "processes, lower omni.data.max_tokens_per_micro_batch, set pipeline.activation_checkpoint_interval "
        "to 1, or shard or offload more (zero_optimization)"
    )
