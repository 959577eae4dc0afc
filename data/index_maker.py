"""Make the blocks of an index that are missing: here, or in a process of its own while training goes on.

Each block is published whole, under its name, in order. Whoever dies leaves the blocks that were made; the
next one makes the others. One process at a time does, which a lock on the folder sees to.
"""

import fcntl
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path

from data.index_build import Measurer, die_with, first_skip, measured, processes_for
from data.index_layout import Layout, block_name
from data.index_store import IndexPart
from data.source_index import failure_file, progress_file
from omni_ds.errors import UserError

_POLL = 0.5


def make_here(
    measurer: Measurer,
    layout: Layout,
    *,
    raise_first: bool,
    show: Callable[[int], None] = lambda rows: None,
) -> list[IndexPart]:
    """All blocks, in memory. show: told the rows measured so far. UserError at the first unusable row when
    raise_first.
    """
    chunks = [layout.chunks(block) for block in range(layout.blocks)]
    parts = measured(measurer, chain.from_iterable(chunks), processes=processes_for(layout.rows))
    count = 0

    def seen(rows: range) -> IndexPart:
        nonlocal count
        count += len(rows)
        show(count)
        return next(parts)

    with closing(parts):
        return [_block(measurer, map(seen, block), raise_first) for block in chunks]


def publish(part: IndexPart, folder: Path, block: int) -> None:
    """UserError when the folder cannot be written."""
    try:
        folder.mkdir(exist_ok=True)
        part.save(folder / block_name(block))
    except OSError as error:
        raise UserError(
            f"omni.data.cache_dir: the sample index cannot be written to {folder} ({error}); "
            "name a folder with space"
        ) from None


def valid(folder: Path, block: int) -> bool:
    try:
        IndexPart.load(folder / block_name(block))
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def leave_failure(folder: Path, message: str) -> None:
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        failure_file(folder).write_text(message)


def make_in_background(
    measurer: Measurer, layout: Layout, folder: Path, *, raise_first: bool, processes: int
) -> int:
    """Fork a process that makes what is missing and then ends, at the latest with this one; its id.

    It must not be one of `multiprocessing`, whose end this process would wait for at its own.
    """
    folder.mkdir(exist_ok=True)
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):  # handlers of the training process are not for this
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        die_with(parent)
        make_missing(measurer, layout, folder, raise_first=raise_first, processes=processes)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def make_missing(
    measurer: Measurer, layout: Layout, folder: Path, *, raise_first: bool, processes: int
) -> None:
    """Publish the blocks that are missing. What goes wrong is left in the folder, for the readers."""
    try:
        with _locked(folder) as alone:
            for left in folder.glob("*.part") if alone else ():
                left.unlink(missing_ok=True)
            missing = [block for block in range(layout.blocks) if not valid(folder, block)]
            chunks = {block: layout.chunks(block) for block in missing}
            done = layout.rows - sum(len(rows) for block in missing for rows in chunks[block])
            progress = _Progress(folder, done)
            # The first block is waited for; later ones are made beside the training.
            for background, blocks in ((False, missing[:1]), (True, missing[1:])):
                wanted = (rows for block in blocks for rows in chunks[block])
                with closing(measured(measurer, wanted, processes=processes, background=background)) as parts:
                    for block in blocks:
                        mine = (progress.seen(next(parts), rows) for rows in chunks[block])
                        publish(_block(measurer, mine, raise_first), folder, block)
    except UserError as error:
        leave_failure(folder, str(error))
    except Exception as error:
        leave_failure(
            folder,
            f"the sample index of {measurer.source.name} could not be made: {type(error).__name__}: {error}; "
            "start again to go on from the rows measured so far",
        )
        raise


def _block(measurer: Measurer, parts: Iterator[IndexPart], raise_first: bool) -> IndexPart:
    kept = []
    for part in parts:
        skip = first_skip(measurer.source, part) if raise_first else None
        if skip is not None:
            raise UserError(f'{skip}; omni.data.on_error is "raise"')
        kept.append(part)
    return IndexPart.joined(kept)


class _Progress:
    """Says at most every second how many rows are measured."""

    def __init__(self, folder: Path, rows: int):
        self.folder, self.rows, self.said = folder, rows, 0.0

    def seen(self, part: IndexPart, rows: range) -> IndexPart:
        self.rows += len(rows)
        if time.monotonic() - self.said > 1:
            self.said = time.monotonic()
            temporary = progress_file(self.folder).with_suffix(".part")
            temporary.write_text(json.dumps({"rows": self.rows}))
            os.replace(temporary, progress_file(self.folder))
        return part


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Wait until no other process makes this index. The system frees the lock of one that dies.

    False where the file system has no locks: then two may make the same blocks, and the later one replaces
    what the earlier published by its equal.
    """
    with open(folder / "lock", "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_POLL)
            except OSError:
                yield False
                return
            else:
                yield True
                return
