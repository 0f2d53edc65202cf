"""Measures how long the parts of a step take, without slowing the step down.

    with timers("forward"):
        loss = model(batch)
    timers.collect()            # once per step
    timers.take()               # {"forward": seconds since the last take, …}

On a GPU a part is measured by two events in its stream, which are read after the GPU has passed them: nothing waits
inside a step. On a CPU it is measured by the clock. Communication that overlaps with the backward pass counts as part
of it: only a profiler can separate them.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.cuda import Event

PARTS = ("forward-backward", "forward", "backward", "gradients", "optimizer")
"""The timed parts of a step. A pipeline schedule interleaves forward and backward passes and times only their sum."""


class Timers:
    """Seconds by the name of a part; parts may be nested."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._pending: deque[tuple[str, Event, Event]] = deque()  # begin and end, in the order of the ends

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Measure the part inside `with`."""
        if not self._on_gpu:
            begun = time.perf_counter()
            yield
            self._seconds[part] += time.perf_counter() - begun
            return
        begin, end = (Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._pending.append((part, begin, end))

    def collect(self) -> None:
        """Read the events that the GPU has passed, without waiting."""
        while self._pending and self._pending[0][2].query():  # type: ignore[no-untyped-call]
            part, begin, end = self._pending.popleft()
            self._seconds[part] += begin.elapsed_time(end) / 1000

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call, and start from 0; waits for the GPU."""
        if self._pending:
            self._pending[-1][2].synchronize()
            self.collect()
        taken, self._seconds = self._seconds, defaultdict(float)
        return dict(taken)
