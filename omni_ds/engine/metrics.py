"""What a run reports: one JSON line a step, the monitors, and a progress bar."""

import json
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from omni_ds.config import Config, monitor_config
from omni_ds.errors import writing


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this rank has used so far: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def build_monitor(config: Config):
    """DeepSpeed's monitors (TensorBoard, CSV, W&B) as the config enables them, or None."""
    sections = (config.tensorboard, config.csv_monitor, config.wandb)
    if not any(section.enabled for section in sections):
        return None
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.monitor.monitor import MonitorMaster

    return MonitorMaster(get_monitor_config(monitor_config(config)))


class Reporter:
    """Writes metrics on rank 0; on other ranks every method does nothing.

    Args:
        config: resolved configuration.
        rank: global rank.
    """

    def __init__(self, config: Config, rank: int):
        self._active = rank == 0
        self._config = config
        self._every = config.steps_per_print
        self._console = Console(stderr=False, highlight=False)
        self._file = self._monitor = self._progress = None

    def start(self, total_steps: int, first_step: int, *, keep: bool) -> None:
        """Open the files and monitors; once nothing can be refused any more.

        Args:
            total_steps: of the whole run, for the progress bar.
            first_step: steps already done when resuming.
            keep: keep all lines of an earlier run, else only those up to ``first_step``.
        """
        if not self._active:
            return
        output = Path(self._config.omni.output_dir)
        for name in () if keep else ("metrics.jsonl", "eval.jsonl"):
            _drop_lines_after(output / name, first_step)
        self._path = output / "metrics.jsonl"
        self._file = open(self._path, "a", buffering=1)  # noqa: SIM115  closed in close()
        self._monitor = build_monitor(self._config)
        if sys.stdout.isatty():
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[line]}"),
                console=self._console,
            )
            self._task = self._progress.add_task("train", total=total_steps, completed=first_step, line="")
            self._progress.start()

    def step(self, row: Mapping[str, object]) -> None:
        """Report one optimizer step: ``row`` holds the columns of ``metrics.jsonl``."""
        if not self._active:
            return
        with writing(str(self._path)):
            self._file.write(json.dumps(row) + "\n")
        step = int(row["step"])
        line = (
            f"loss {row['loss']:.4f}  norm {row['grad_norm']:.3f}  "
            f"lr {_compact(row['lr'])}  "
            f"{row['tokens_per_second']:.0f} tok/s"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=step, line=line)
        elif step % self._every == 0 or step == 1:
            self._console.print(f"step {step}  {line}", soft_wrap=True)
        numbers = {
            key: value for key, value in row.items() if isinstance(value, int | float) and key != "step"
        }
        numbers |= {f"lr/{name}": rate for name, rate in row["lr"].items()}
        self.events("train", numbers, step)

    def events(self, prefix: str, values: Mapping[str, float], step: int) -> None:
        """Send scalar values to the monitors, on the axis of optimizer steps."""
        if self._active and self._monitor is not None:
            self._monitor.write_events([(f"{prefix}/{name}", value, step) for name, value in values.items()])

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self._active:
            self._console.print(text, soft_wrap=True, markup=False)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._file is not None:
            self._file.close()


def _compact(rates: Mapping[str, float]) -> str:
    """``3.0e-04 llm, 1.8e-04 vision audio``: parts of one rate together."""
    parts: dict[str, list[str]] = {}
    for name, rate in rates.items():
        parts.setdefault(f"{rate:.1e}", []).append(name)
    if len(parts) == 1:
        return next(iter(parts))
    return ", ".join(f"{rate} {' '.join(names)}" for rate, names in parts.items())


def _drop_lines_after(path: Path, step: int) -> None:
    """Keep the lines of steps up to ``step``: what a killed run wrote past its checkpoint comes again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the line that was being written when the run was killed
        if row.get("step", 0) <= step:
            kept.append(line)
    path.write_text("".join(line + "\n" for line in kept))
