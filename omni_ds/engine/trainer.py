"""The training loop: agree, run the step, report, evaluate, save."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from data.loader import StepBatch
from omni_ds.checkpoint import state
from omni_ds.checkpoint.layout import read_index, write_atomically
from omni_ds.config import Config
from omni_ds.engine.evaluate import evaluate, flatten
from omni_ds.engine.metrics import Reporter, peak_memory_bytes
from omni_ds.engine.runtime import Runtime
from omni_ds.engine.step import StepResult
from omni_ds.engine.step_input import prepare
from omni_ds.engine.timing import Timing
from omni_ds.engine.trace import Tracer
from omni_ds.errors import UserError, writing
from omni_ds.parallel.agreement import AgreedError, agree_on_step, all_or_error, same_everywhere


@dataclass(frozen=True)
class EvaluationSet:
    """A held-out set: ``batches()`` yields its forward-only steps; ``tasks``: every task name in it."""

    batches: Callable[[], Iterable[StepBatch]]
    tasks: tuple[str, ...]


class Trainer:
    """Trains one runtime.

    Args:
        config: resolved configuration.
        runtime: engines and executor of this rank.
        evaluation: held-out sets by name.
        fingerprint: of data, tokenizer and sampling; a checkpoint is resumed only with the same.
        reporter: metrics of this run.
        tracer: records the action times of some steps.
        timing: measures actions for the planning of later steps.
    """

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        evaluation: Mapping[str, EvaluationSet],
        fingerprint: str,
        reporter: Reporter,
        tracer: Tracer | None = None,
        timing: Timing | None = None,
    ):
        self._tracer, self._timing = tracer, timing
        self._config, self._runtime = config, runtime
        self._evaluation, self._fingerprint, self._reporter = evaluation, fingerprint, reporter
        self._output = Path(config.omni.output_dir)
        self._samples = 0
        self._failed: Counter[str] = Counter()

    def train(self, batches: Iterable[StepBatch], first_step: int, last_step: int) -> None:
        """Run steps ``first_step + 1`` to ``last_step``; ``batches`` yields one each.

        Raises:
            UserError: more media failed than ``omni.data.max_skip_fraction`` allows, or the first with
                ``on_error: raise``; the output folder cannot be written.
        """
        every, save_every = self._config.omni.eval.every, self._config.omni.checkpoint.every
        iterator = iter(batches)
        for step in range(first_step + 1, last_step + 1):
            started = time.perf_counter()
            # What a loader refuses (a batch that fits no micro-batch) it refuses on every rank.
            batch = same_everywhere(lambda: next(iterator))
            waited = time.perf_counter() - started
            rates = self._runtime.learning_rates()
            result = self._one_step(step, batch)
            self._report(step, batch, result, time.perf_counter() - started, waited, rates)
            if every is not None and step % every == 0 and step < last_step:
                self.evaluate(step)
            if save_every is not None and (step % save_every == 0 or step == last_step):
                self.save(step)

    def _one_step(self, step: int, batch: StepBatch) -> StepResult:
        runtime = self._runtime
        failed = agree_on_step(
            batch.step_plan, sorted({row for row, _ in batch.failed}), runtime.groups.control
        )
        origin = time.perf_counter_ns()
        if failed:
            self._count_failures(failed, batch)
        self._samples += batch.step_plan.samples
        fits = self._timing is not None and self._timing.wants(step)
        traced = self._tracer is not None and self._tracer.wants(step)
        result = runtime.executor.run(
            prepare(batch, runtime.rank, failed, runtime.device, measure=fits or traced)
        )
        if fits:
            self._timing.add(step, batch.step_plan, result.compute)
        if traced:
            self._tracer.add(step, batch.step_plan, result.times, origin)
        return result

    def _count_failures(self, failed: tuple[int, ...], batch: StepBatch) -> None:
        data = self._config.omni.data
        reasons = dict(batch.failed)
        for row in failed:
            reason = reasons.get(row, "a medium could not be decoded on another rank")
            self._reporter.say(f"row {row}: {reason}; the sample has no targets in this step")
        self._failed["medium could not be decoded"] += len(failed)
        total = sum(self._failed.values())
        if data.on_error == "raise":
            raise AgreedError(
                f"rows {', '.join(map(str, failed))}: media could not be decoded; repair them, or set "
                "omni.data.on_error to skip"
            )
        seen = self._samples + batch.step_plan.samples
        if seen >= 100 and total > data.max_skip_fraction * seen:
            raise AgreedError(
                f"{total} of {seen} samples had media that could not be decoded, more than "
                f"omni.data.max_skip_fraction {data.max_skip_fraction}; repair the data or raise the limit"
            )

    def _report(
        self,
        step: int,
        batch: StepBatch,
        result: StepResult,
        seconds: float,
        waited: float,
        rates: Mapping[str, float],
    ) -> None:
        plan = batch.step_plan
        row = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": rates,
            "samples": plan.samples,
            "tokens": plan.tokens,
            "target_tokens": result.target_tokens,
            "tokens_per_second": plan.tokens / seconds,
            "step_seconds": seconds,
            "data_wait_seconds": waited,
            "plan_wait_seconds": min(waited, batch.plan_seconds),
            "micro_batches": plan.micro_batches,
            "encoder_imbalance": plan.encoder_imbalance,
            "llm_imbalance": plan.llm_imbalance,
            "encoder_imbalance_given": plan.encoder_imbalance_given,
            "llm_imbalance_given": plan.llm_imbalance_given,
            "long_items": plan.long_items,
            "feature_bytes": result.feature_bytes,
            "bubble_fraction": plan.bubble_fraction,
            "peak_memory_bytes": peak_memory_bytes(self._runtime.device),
        }
        if self._runtime.plan.llm.experts:
            row["auxiliary_loss"] = result.auxiliary_loss
            row["expert_load"] = self._runtime.expert_load()
        if result.reduce_seconds is not None:
            row["reduce_seconds"] = result.reduce_seconds
        if self._failed:
            row["failed_samples"] = sum(self._failed.values())
        if result.skipped:
            row["skipped"] = True
            self._reporter.say(f"step {step}: the gradient norm is not finite; no weight was changed")
        self._reporter.step(row)

    def evaluate(self, step: int) -> dict[str, dict]:
        """Evaluate every set and write ``eval.json`` (and a line of ``eval.jsonl``)."""
        runtime = self._runtime
        results: dict[str, dict] = {}
        for name, held_out in self._evaluation.items():
            results[name] = evaluate(
                (self._evaluation_input(batch) for batch in held_out.batches()),
                held_out.tasks,
                runtime.executor,
                runtime.plan,
                runtime.rank,
                runtime.groups.control,
                runtime.layer_groups.sequence,
            )
        if runtime.rank == 0 and results:
            record = {"step": step, "sets": results}
            with writing(str(self._output / "eval.json")):
                write_atomically(self._output / "eval.json", json.dumps(record, indent=2) + "\n")
                with open(self._output / "eval.jsonl", "a") as file:
                    file.write(json.dumps(record) + "\n")
        for name, values in flatten(results).items():
            self._reporter.say(f"step {step}  eval {name}  {values:.4f}")
        self._reporter.events("eval", flatten(results), step)
        return results

    def _evaluation_input(self, batch: StepBatch):
        rows = sorted({row for row, _ in batch.failed})
        failed = agree_on_step(batch.step_plan, rows, self._runtime.groups.control)
        return prepare(batch, self._runtime.rank, failed, self._runtime.device)

    def save(self, step: int) -> None:
        """Write a checkpoint of the state after ``step`` steps."""
        run_state = {
            "fingerprint": self._fingerprint,
            "samples": self._samples,
            "failed": dict(self._failed),
            "schedules": self._runtime.schedules.state_dict(),
            "times": self._timing.state_dict() if self._timing is not None else None,
        }
        folder = state.save(
            self._output / "checkpoints",
            step,
            self._runtime.engine_states(),
            run_state,
            self._runtime.groups.control,
            self._config.omni.checkpoint.keep_last,
        )
        self._reporter.say(f"step {step}  checkpoint {folder}")

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint; collective.

        Raises:
            AgreedError: it was written for other data, another batch size or seed, or does not fit the model.
        """
        group = self._runtime.groups.control
        index = all_or_error(lambda: self._fill(folder), group)
        for engine in self._runtime.engine_states():
            engine.refresh()
        run_state = index["run"]
        self._samples = run_state["samples"]
        self._failed.update(run_state["failed"])
        self._runtime.schedules.load_state_dict(run_state["schedules"])
        if self._timing is not None and run_state["times"] is not None:
            self._timing.load_state_dict(run_state["times"])

    def _fill(self, folder: Path) -> dict:
        index = read_index(folder)
        if index["run"]["fingerprint"] != self._fingerprint:
            raise UserError(
                f"{folder} was written with other data, tokenizer, seed or train_batch_size: the samples "
                "after it would not be those of an uninterrupted run. Restore them, or start without --resume"
            )
        state.load(folder, index, self._runtime.engine_states())
        return index
