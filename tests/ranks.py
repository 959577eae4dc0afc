"""Ranks and commands for the tests, as forked processes: heavy packages are imported once, in the parent."""

import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from omni_ds.emulate.fork import RankFailure, run_ranks
from omni_ds.emulate.fork import free_port as _free_port

__all__ = ["RankFailure", "_free_port", "run_command", "run_ranks"]


def run_command(argv: list[str], timeout: float = 90.0) -> tuple[int, str]:
    """``run.main(argv)`` as one process without a launcher; returns (exit status, what it printed).

    Forked instead of started, so that heavy packages are not imported again for every command.

    Raises:
        RankFailure: it did not end in time.
    """
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="command-") as folder:
        log = Path(folder) / "log"
        pid = os.fork()
        if not pid:
            _command_child(argv, log, timeout)
        deadline = time.monotonic() + timeout + 5
        while time.monotonic() < deadline:
            done, code = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(code), log.read_text(errors="replace")
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise RankFailure(f"{' '.join(argv)} did not end in {timeout} s:\n{log.read_text(errors='replace')}")


def _command_child(argv: list[str], log: Path, timeout: float) -> None:
    code = 70
    try:
        output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
            os.environ.pop(name, None)
        faulthandler.dump_traceback_later(timeout, file=sys.stderr)
        import run

        code = run.main(argv)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
