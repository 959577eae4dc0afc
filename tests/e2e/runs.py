"""Whole runs of ``run.py`` for the end-to-end tests: ranks that can be killed, and what they leave behind."""

import contextlib
import functools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranks import RankFailure, _free_port
from tiny import config_dict, make_checkpoints, merged, write_config

TRACEBACK = "Traceback (most recent call last)"


@functools.cache
def checkpoints() -> Path:
    """The tiny HF checkpoints, made once; heavy packages are imported here, so that forks need not."""
    import torch

    torch.set_num_threads(1)  # a forked child cannot use a thread pool its parent started
    from omni_ds.engine.environment import prepare_imports

    prepare_imports()
    import omni_ds.engine.launch  # noqa: F401

    path = Path(tempfile.mkdtemp(prefix="e2e-"))
    make_checkpoints(path)
    return path


def raw_config(output: Path, **changes: Any) -> dict[str, Any]:
    """The tiny configuration writing to ``output``, with nested changes of top-level sections."""
    return merged(config_dict(checkpoints(), output), changes)


def config_file(output: Path, **changes: Any) -> str:
    output.mkdir(parents=True, exist_ok=True)
    return str(write_config(raw_config(output, **changes), output.parent / f"{output.name}.json"))


class Ranks:
    """``run.py`` on ``world`` forked ranks, as a launcher would start it.

    Args:
        before: called in every rank first, to make it fail in some way.
    """

    def __init__(self, argv: list[str], world: int, before: Callable[[], None] = lambda: None):
        checkpoints()
        handle, name = tempfile.mkstemp(prefix="ranks-", suffix=".log")
        self.argv, self.log = argv, Path(name)
        port = _free_port()
        self._running: dict[int, int] = {}  # pid -> rank
        self._status: dict[int, int] = {}
        for rank in range(world):
            pid = os.fork()
            if not pid:
                _rank(argv, rank, world, port, handle, before)
            self._running[pid] = rank
        os.close(handle)

    def kill(self) -> None:
        """SIGKILL every rank."""
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._running.clear()

    def _alive(self) -> bool:
        for pid in list(self._running):
            done, code = os.waitpid(pid, os.WNOHANG)
            if done:
                self._status[self._running.pop(pid)] = os.waitstatus_to_exitcode(code)
        return bool(self._running)

    def _check(self) -> None:
        failed = {rank: status for rank, status in self._status.items() if status}
        for rank, status in sorted(failed.items()):
            raise RankFailure(f"rank {rank} exited with {status}:\n{self.text()}")

    def kill_after_step(self, output: Path, step: int, timeout: float = 120.0) -> None:
        """SIGKILL all ranks as soon as ``metrics.jsonl`` has a line of ``step``: they are in the next one."""
        deadline = time.monotonic() + timeout
        while self._alive() and time.monotonic() < deadline:
            self._check()
            if any(row["step"] >= step for row in metrics(output)):
                return self.kill()
            time.sleep(0.002)
        self.kill()
        raise RankFailure(f"step {step} was not seen:\n{self.text()}")

    def wait(self, timeout: float = 120.0) -> str:
        """What they printed, once all ranks have ended with status 0."""
        self._wait(timeout, fail_early=True)
        return self.text()

    def statuses(self, timeout: float = 120.0) -> list[int]:
        """Exit status by rank, once all have ended by themselves."""
        self._wait(timeout, fail_early=False)
        return [self._status[rank] for rank in sorted(self._status)]

    def _wait(self, timeout: float, fail_early: bool) -> None:
        deadline = time.monotonic() + timeout
        try:
            while self._alive():
                if fail_early:
                    self._check()
                if time.monotonic() > deadline:
                    raise RankFailure(f"{self.argv} did not end in {timeout} s:\n{self.text()}")
                time.sleep(0.02)
            if fail_early:
                self._check()
        finally:
            self.kill()

    def text(self) -> str:
        return self.log.read_text(errors="replace")


def _rank(argv: list[str], rank: int, world: int, port: int, log: int, before: Callable) -> None:
    code = 70
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
        )
        before()
        import run

        code = run.main(argv)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        with contextlib.suppress(ValueError):
            sys.stdout.flush()
        os._exit(code)


def metrics(output: Path) -> list[dict[str, Any]]:
    """Complete lines of ``metrics.jsonl``."""
    path = output / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def series(output: Path, *keys: str) -> list[tuple[Any, ...]]:
    """(step, values of ``keys``) by step."""
    return [(row["step"], *(row[key] for key in keys)) for row in metrics(output)]


def exported(folder: Path) -> dict[str, Any]:
    """Tensors of an exported folder by name."""
    from safetensors.torch import load_file

    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
