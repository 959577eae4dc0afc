"""The index of one source as its readers see it: blocks that are there, or that a process is still making."""

import json
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from data.index_cache import edition_of
from data.index_layout import Layout, block_name
from data.index_store import IndexPart, Skip
from omni_ds.errors import UserError

STALLED = 600.0  # seconds without a newly measured row after which nobody is believed to measure any more
_SAY = 30.0  # seconds of waiting before it is said
_POLL = 0.1


class SourceIndex:
    """Usable rows of a source, numbered block after block.

    blocks: how many there are. Block b has the usable rows stop(b - 1) .. stop(b) - 1, which is the same on
    every rank and in every run, whenever it was measured. check: called when one more block is known.
    """

    def __init__(self, name: str, layout: Layout, folder: Path | None, parts: list[IndexPart] | None = None):
        self.name, self.layout, self.folder = name, layout, folder
        self.check: Callable[[], None] = lambda: None
        self._parts: list[IndexPart] = []
        self._stops: list[int] = []
        for part in parts or ():
            self._add(part)

    @property
    def blocks(self) -> int:
        return self.layout.blocks

    @property
    def complete(self) -> bool:
        """Whether this process knows all blocks."""
        return len(self._parts) == self.blocks

    @property
    def known(self) -> list[IndexPart]:
        """The blocks that this process knows, without waiting."""
        return list(self._parts)

    def _add(self, part: IndexPart) -> None:
        self._parts.append(part)
        self._stops.append((self._stops[-1] if self._stops else 0) + len(part))

    def read(self) -> None:
        """Get to know the blocks that are there."""
        while not self.complete and self._published():
            self._add(IndexPart.load(self._next()))
        self.check()

    def stop(self, block: int) -> int:
        """Usable rows of all blocks up to this one, which is waited for.

        UserError when its maker failed or makes no progress, or when `check` objects.
        """
        while len(self._parts) <= block:
            self.wait()
        return self._stops[block]

    def __len__(self) -> int:
        """Usable rows of all blocks; waits for them."""
        return self.stop(self.blocks - 1)

    def find(self, row: int) -> tuple[IndexPart, int]:
        """The block of a usable row, and its number there. IndexError when there are not so many."""
        while not self._stops or row >= self._stops[-1]:
            if self.complete:
                raise IndexError(f"usable row {row} of {len(self)} of {self.name}")
            self.wait()
        block = bisect_right(self._stops, row)
        return self._parts[block], row - (self._stops[block - 1] if block else 0)

    @property
    def skipped(self) -> Counter[str]:
        """Rows left out of the known blocks, by reason."""
        return sum((part.skipped for part in self._parts), Counter())

    def digest(self) -> str:
        """Changes when the numbers of the usable rows do. Several blocks are judged by the first, a
        cross-section of all rows, by the number of rows and by how often they were measured again: so it is
        known at the start, and the same for a copy of the data elsewhere.
        """
        self.stop(0)
        if self.blocks == 1:
            return self._parts[0].digest()
        return f"{self._parts[0].digest()} {self.layout} {edition_of(self.folder) if self.folder else 0}"

    @property
    def examples(self) -> list[Skip]:
        return [skip for part in self._parts for skip in part.examples]

    def wait(self, show: Callable[[int], None] | None = None) -> None:
        """Until one more block is there. show: called with the number of rows measured so far."""
        started = changed = time.monotonic()
        rows, say_at = self._progress(), _SAY
        while not self._published():
            self.raise_failure()
            now, latest = time.monotonic(), self._progress()
            if latest != rows:
                rows, changed = latest, now
            if now - changed > STALLED:
                raise UserError(
                    f"the sample index of {self.name} has not grown for {STALLED / 60:g} minutes ({rows:,} "
                    f"of {self.layout.rows:,} rows): the process that makes it has ended, or the disk of "
                    f"{self.folder} does not answer. It ends with rank 0 of a run: look for an error there, "
                    "then start again; what is measured is kept"
                )
            if show is not None:
                show(rows)
            elif now - started > say_at:
                print(
                    f"waiting for the sample index of {self.name}: {rows:,} of {self.layout.rows:,} rows",
                    file=sys.stderr,
                    flush=True,
                )
                say_at *= 4
            time.sleep(_POLL)
        self._add(IndexPart.load(self._next()))
        self.check()

    def raise_failure(self) -> None:
        """UserError of the process that makes the index."""
        if self.folder is None:
            return
        try:
            raise UserError(failure_file(self.folder).read_text())
        except OSError:
            return

    def _next(self) -> Path:
        return self.folder / block_name(len(self._parts))

    def _published(self) -> bool:
        return self.folder is not None and self._next().is_file()

    def _progress(self) -> int:
        try:
            return json.loads(progress_file(self.folder).read_text())["rows"]
        except (OSError, ValueError, KeyError):
            return 0


def failure_file(folder: Path) -> Path:
    """Where the process that makes an index leaves why it could not."""
    return folder / "failed"


def progress_file(folder: Path) -> Path:
    """Where it leaves how far it is: {"rows": measured so far}."""
    return folder / "progress.json"
