"""How long a rank is held up by gradient reductions in a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from omni_ds.plan.actions import Kind

REDUCTIONS = frozenset({Kind.TIED, Kind.REDUCE, Kind.ER})


class ReductionClock:
    """Sums the time of TIED, REDUCE and ER, the wait for other ranks included.

    Args:
        device: of this rank. On the CPU a reduction blocks the program, and a clock around it will do; on a
            GPU it blocks a stream, which only events can time.
        measure: put events into the stream, and wait for them at the end of the step.
    """

    def __init__(self, device: torch.device, measure: bool):
        self._on_gpu, self._measure = device.type == "cuda", measure
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def around(self, kind: Kind) -> Iterator[None]:
        if kind not in REDUCTIONS or (self._on_gpu and not self._measure):
            yield
        elif self._on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def seconds(self) -> float | None:
        """The sum; None on a GPU that was not measured."""
        if not self._on_gpu:
            return self._seconds
        if not self._measure:
            return None
        for _, end in self._events[-1:]:
            end.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
