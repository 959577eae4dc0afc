"""One training run from the command line's arguments to the exported folder."""

import argparse
import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from data.index import IndexedDataset, open_dataset
from data.loader import EvalLoader, StepLoader
from data.sampler import GlobalBatchSampler
from omni_ds.checkpoint import state
from omni_ds.checkpoint.layout import read_index, set_aside_after, write_atomically
from omni_ds.composition import Composition, complete, mesh_of, plan_of, read_composition
from omni_ds.config import Config
from omni_ds.config.load import load_config
from omni_ds.config.resolve import resolve
from omni_ds.engine import environment
from omni_ds.engine.export import check_target, export_model
from omni_ds.engine.metrics import Reporter
from omni_ds.engine.pipeline_module import stage_device
from omni_ds.engine.runtime import Runtime, build_runtime
from omni_ds.engine.summary import (
    describe_attention,
    describe_data,
    describe_parts,
    describe_plan,
    describe_unused,
)
from omni_ds.engine.timing import Timing
from omni_ds.engine.trace import Tracer
from omni_ds.engine.trainer import EvaluationSet, Trainer
from omni_ds.errors import UserError, writing
from omni_ds.layout import numerics_of, settle_degrees
from omni_ds.parallel.agreement import AgreedError, all_or_error, broadcast_from_rank_0, same_everywhere
from omni_ds.parallel.groups import ProcessGroups
from omni_ds.plan.auto import Choice
from omni_ds.plan.build import Plan
from omni_ds.plan.sample import SampleMeta

_TRACED = 10  # steps, with omni.trace and no --trace
_TYPICAL = 512  # samples


def train(arguments: argparse.Namespace) -> int:
    """Train, evaluate and export as the arguments say; returns the exit status.

    Raises:
        UserError: something the user can put right; the same on every rank.
    """
    config = load_config(arguments.deepspeed_config, arguments.set)
    environment.start_distributed()
    try:
        _run(config, arguments)
    except AgreedError:
        environment.stop_distributed()  # all ranks reach this
        raise
    except UserError as error:
        # Of this rank alone: the others wait in a collective until the launcher ends them.
        print(f"error: rank {dist.get_rank()}: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    environment.stop_distributed()
    return 0


@dataclass(frozen=True)
class Run:
    """Everything a run is made of, on this rank; ``config`` is resolved; ``choice``: why these degrees."""

    config: Config
    composition: Composition
    dataset: IndexedDataset
    held_out: dict[str, IndexedDataset]
    sampler: GlobalBatchSampler
    plan: Plan
    runtime: Runtime
    choice: Choice | None = None

    def timing(self) -> Timing | None:
        """Measured times, where they can move anything."""
        data, encoders = self.config.omni.data, self.config.omni.encoder_parallel
        if not encoders.measured_times or not self.plan.encoders or self.plan.mesh.pipe == 1:
            return None
        ahead = data.num_workers * (data.prefetch_steps + 1)
        return Timing(self.plan, self.runtime.rank, self.runtime.groups.control, horizon=ahead)

    def batches(self, first_step: int, last_step: int, timing: Timing | None = None) -> StepLoader:
        """This rank's input of the steps after ``first_step`` up to ``last_step``."""
        data = self.config.omni.data
        return StepLoader(
            self.dataset,
            self.sampler,
            self.plan,
            self.runtime.rank,
            first_step,
            last_step,
            num_workers=data.num_workers,
            prefetch=data.prefetch_steps,
            times=timing.shared if timing is not None else None,
        )

    def evaluation(self) -> dict[str, EvaluationSet]:
        return {name: _evaluation_set(self, dataset) for name, dataset in self.held_out.items()}

    def fingerprint(self) -> str:
        """Changes when the order or content of the training samples would."""
        parts = {
            "dataset": self.dataset.fingerprint,
            "weights": [source.weight for source in self.config.omni.data.train],
            "batch": self.config.train_batch_size,
            "seed": self.config.omni.train.seed,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def assemble(config: Config) -> Run:
    """Read, index, plan and build; collective over the initialised world.

    Raises:
        UserError: on every rank alike.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    has_cuda = torch.cuda.is_available()
    device = environment.smallest_device()
    config = same_everywhere(lambda: complete(config))
    config, choice = same_everywhere(lambda: settle_degrees(config, world, device))
    config = same_everywhere(lambda: resolve(config, world, None, has_cuda=has_cuda))
    groups = ProcessGroups.create(mesh_of(config, world), environment.TIMEOUT)
    broadcast_from_rank_0(lambda: _prepare_output(Path(config.omni.output_dir)), groups.control)
    composition = all_or_error(lambda: read_composition(config), groups.control)
    same_everywhere(lambda: plan_of(config, composition, world))  # degrees that cannot work, before the data
    dataset = _open(config.omni.data.train, config, composition, groups, rolling=True)
    held_out = {
        name: _open([each], config, composition, groups) for name, each in config.omni.eval.sets.items()
    }
    config, sampler, plan = same_everywhere(lambda: _decide(config, composition, dataset, world, has_cuda))
    runtime = build_runtime(config, composition, plan, groups, rank, stage_device(_local_rank()))
    return Run(config, composition, dataset, held_out, sampler, plan, runtime, choice)


def _decide(
    config: Config, composition: Composition, dataset: IndexedDataset, world: int, has_cuda: bool
) -> tuple[Config, GlobalBatchSampler, Plan]:
    """What follows from configuration and index alone, the same on every rank."""
    omni = config.omni
    sampler = GlobalBatchSampler(
        dataset.sizes, list(dataset.weights), config.train_batch_size, omni.train.seed, dataset.growing
    )
    config = resolve(config, world, len(dataset), has_cuda=has_cuda)
    samples = []
    if omni.encoder_parallel.first_stage_cut == "with_encoders":
        samples = _typical_samples(dataset, sampler)
    return config, sampler, plan_of(config, composition, world, samples)


def _typical_samples(dataset: IndexedDataset, sampler: GlobalBatchSampler) -> list[SampleMeta]:
    """Those of the first global batches, as many as say what the data are like."""
    batches = max(1, _TYPICAL // sampler.batch_size)
    return [meta for step in range(batches) for meta in dataset.metas(sampler.rows(step))]


def _run(config: Config, arguments: argparse.Namespace) -> None:
    run = assemble(config)
    config, runtime, group = run.config, run.runtime, run.runtime.groups.control
    output = Path(config.omni.output_dir)
    export_dir = arguments.export or (str(output / "export") if config.omni.export.at_end else None)
    if export_dir is not None:
        check_target(export_dir, group)
    first_step, last_step, folder = 0, config.omni.train.max_steps, None
    if arguments.resume is not None:
        tag = None if arguments.resume == "latest" else arguments.resume
        folder = broadcast_from_rank_0(lambda: state.find(output / "checkpoints", tag), group)
        first_step = all_or_error(lambda: read_index(folder), group)["step"]
        if first_step > last_step and not arguments.eval_only:
            raise AgreedError(
                f"--resume: {folder} has done {first_step} steps, omni.train.max_steps is {last_step}; "
                "raise it, or resume from an earlier checkpoint"
            )
    reporter = Reporter(config, runtime.rank)
    for text in (
        describe_parts(config, runtime),
        run.composition.text.describe(run.composition.embedding_rows),
        describe_unused(run.composition, runtime),
        "" if run.choice is None else str(run.choice),
        describe_plan(run.plan, numerics_of(config, fused=runtime.device.type == "cuda")),
        describe_attention(runtime),
        describe_data(run.dataset, run.held_out),
    ):
        if text:
            reporter.say(text)
    tracer = _tracer(config, arguments.trace, first_step, last_step, group)
    timing = run.timing()
    trainer = Trainer(config, runtime, run.evaluation(), run.fingerprint(), reporter, tracer, timing)
    try:
        if folder is not None:
            trainer.resume(folder)
            reporter.say(f"resumed from {folder}: step {first_step} of {last_step}")
        if not arguments.eval_only:
            broadcast_from_rank_0(lambda: _begin(output, config, first_step, reporter), group)
        reporter.start(last_step, first_step, keep=arguments.eval_only)
        if not arguments.eval_only:
            started = time.perf_counter()
            trainer.train(run.batches(first_step, last_step, timing), first_step, last_step)
            reporter.say(f"trained {last_step - first_step} steps in {time.perf_counter() - started:.0f} s")
        trainer.evaluate(first_step if arguments.eval_only else last_step)
        if export_dir is not None and (arguments.export or not arguments.eval_only):
            reporter.say(f"exported to {export_model(export_dir, config, run.composition, runtime)}")
        picture = None if tracer is None else tracer.draw(run.plan)
        if picture is not None:
            reporter.say(f"traced: {picture}, and {picture.with_suffix('.json')} for ui.perfetto.dev")
    finally:
        reporter.close()


def _begin(output: Path, config: Config, first_step: int, reporter: Reporter) -> None:
    """What rank 0 leaves in the output folder before the first step."""
    with writing(str(output)):
        for path in set_aside_after(output / "checkpoints", first_step):
            reporter.say(f"a checkpoint of another run was set aside: {path}")
        write_atomically(output / "resolved_config.json", json.dumps(config.to_dict(), indent=2) + "\n")


def _tracer(
    config: Config, steps: str | None, first_step: int, last_step: int, group: dist.ProcessGroup
) -> Tracer | None:
    """A tracer for ``--trace FIRST:LAST`` or ``--trace STEP``; ``omni.trace`` alone means the first ten."""
    if steps is None and not config.omni.trace:
        return None
    chosen = range(first_step + 1, min(last_step, first_step + _TRACED) + 1)
    if steps is not None:
        first, _, last = steps.partition(":")
        try:
            chosen = range(int(first), int(last or first) + 1)
        except ValueError:
            raise AgreedError(
                f"--trace {steps}: give a step or FIRST:LAST, for example --trace 10:12"
            ) from None
    if not set(chosen) & set(range(first_step + 1, last_step + 1)):
        raise AgreedError(f"--trace {steps}: this run does steps {first_step + 1} to {last_step}")
    return Tracer(Path(config.omni.output_dir) / "trace.json", chosen, group)


def _prepare_output(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        probe = output / ".write-test"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"omni.output_dir {output}: cannot write there ({error.strerror}); name another folder"
        ) from None


def _open(
    sources, config: Config, composition: Composition, groups: ProcessGroups, *, rolling: bool = False
) -> IndexedDataset:
    """Index on rank 0, then open on every rank; collective."""

    def opened(builder: bool) -> IndexedDataset:
        return open_dataset(
            sources,
            config.omni.data,
            composition.text,
            composition.media,
            {meta.name: meta for meta in composition.encoders},
            builder=builder,
            rolling=rolling,
        )

    broadcast_from_rank_0(lambda: opened(True) and None, groups.patient)
    return all_or_error(lambda: opened(False), groups.control)


def _evaluation_set(run: Run, dataset: IndexedDataset) -> EvaluationSet:
    def batches() -> EvalLoader:
        return EvalLoader(
            dataset,
            run.config.train_batch_size,
            run.plan,
            run.runtime.rank,
            num_workers=min(1, run.config.omni.data.num_workers),
            prefetch=run.config.omni.data.prefetch_steps,
        )

    return EvaluationSet(batches, tuple(dataset.tasks))


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
