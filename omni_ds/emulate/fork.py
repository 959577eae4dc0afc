"""Run a function on several ranks of this machine over gloo, with a time limit that names the rank that hung.

Heavy packages are imported once, in the parent; ranks are forked from it.
"""

import faulthandler
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class RankFailure(AssertionError):
    """A rank raised or hung; the message holds what each said."""


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """``function(*args)`` on ``world`` ranks of a fresh gloo world; returns the results by rank.

    Raises:
        RankFailure: a rank raised (with its traceback) or did not end within ``timeout`` seconds (with the
            stack it hung in).
    """
    import torch

    torch.set_num_threads(1)  # a forked child cannot use a thread pool its parent started
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        port = free_port()
        pids = {
            _fork(function, args, rank, world, port, Path(folder), timeout): rank for rank in range(world)
        }
        hung, status = _wait(dict(pids), timeout + 10)
        return _collect(Path(folder), world, hung, status)


def _fork(function, args, rank: int, world: int, port: int, folder: Path, timeout: float) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        output = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            LOCAL_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
            OMNI_DS_TIMEOUT_MINUTES=str(timeout / 60 + 1),  # the hang is reported here, not by gloo,
        )
        stack = open(folder / f"{rank}.stack", "w")  # noqa: SIM115  faulthandler keeps it
        faulthandler.dump_traceback_later(timeout, file=stack)
        from omni_ds.engine.environment import start_distributed, stop_distributed

        start_distributed()
        result = function(*args)
        stop_distributed()
        (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _wait(pids: dict[int, int], limit: float) -> tuple[list[int], dict[int, int]]:
    """Ranks that had to be killed because they hung, and every rank's exit code."""
    deadline, grace, status = time.monotonic() + limit, None, {}
    while pids:
        for pid in list(pids):
            done, code = os.waitpid(pid, os.WNOHANG)
            if done:
                status[pids.pop(pid)] = os.waitstatus_to_exitcode(code)
        if grace is None and any(code != 0 for code in status.values()):
            grace = time.monotonic() + 5  # others may fail by themselves; afterwards they only wait for it
        now = time.monotonic()
        if now > deadline or (grace is not None and now > grace):
            hung = [] if grace is not None else sorted(pids.values())
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return hung, status
        time.sleep(0.02)
    return [], status


def _collect(folder: Path, world: int, hung: list[int], status: dict[int, int]) -> list[Any]:
    parts = []
    for rank in range(world):
        error, stack = folder / f"{rank}.error", folder / f"{rank}.stack"
        if error.exists():
            parts.append(f"rank {rank} failed:\n{error.read_text()}{_tail(folder / f'{rank}.log')}")
        elif rank in hung:
            parts.append(f"rank {rank} hung:\n{stack.read_text()}{_tail(folder / f'{rank}.log')}")
        elif status.get(rank, -1) not in (0, -signal.SIGKILL) and not (folder / f"{rank}.result").exists():
            parts.append(f"rank {rank} exited with {status.get(rank)}{_tail(folder / f'{rank}.log')}")
    if parts:
        raise RankFailure("\n".join(parts))
    return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(world)]


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()[-15:] if path.exists() else []
    return "".join(f"    | {line}\n" for line in lines)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
