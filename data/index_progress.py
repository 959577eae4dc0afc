"""How far an index is: a bar on a terminal, now and then a line elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY = 30.0  # seconds between lines


@contextmanager
def progress(name: str, rows: int) -> Iterator[Callable[[int], None]]:
    """A function to be told the number of rows measured so far."""
    if not sys.stderr.isatty():
        yield _lines(name, rows)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(f"indexing {name}", total=rows)
        yield lambda done: bars.update(bar, completed=done)


def _lines(name: str, rows: int) -> Callable[[int], None]:
    said = time.monotonic()

    def show(done: int) -> None:
        nonlocal said
        if time.monotonic() - said > _EVERY:
            said = time.monotonic()
            print(f"indexing {name}: {done:,} of {rows:,} rows", file=sys.stderr, flush=True)

    return show
