"""How long the parts of a step take, measured without slowing the step down.

    with timers("forward"):
        loss = model(batch)
    timers.collect()            # once a step
    timers.take()               # {"forward": seconds since the last take, …}

On a GPU a part lies between two events of its stream, which are read when the GPU has long passed them: nothing waits
inside a step. On a CPU it is the clock. Communication that goes on beside the backward pass is part of it here: only
a profile tells them apart.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.cuda import Event


class Timers:
    """Seconds by the name of a part; parts may lie inside one another."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._passing: deque[tuple[str, Event, Event]] = deque()  # begin and end, in the order of the ends
        self._spare: list[Event] = []

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Around one part."""
        if not self._on_gpu:
            begun = time.perf_counter()
            yield
            self._seconds[part] += time.perf_counter() - begun
            return
        begin, end = self._event(), self._event()
        begin.record()
        yield
        end.record()
        self._passing.append((part, begin, end))

    def _event(self) -> Event:
        return self._spare.pop() if self._spare else Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def collect(self) -> None:
        """Read the events that the GPU has passed, and use them again; waits for none."""
        while self._passing and self._passing[0][2].query():  # type: ignore[no-untyped-call]
            part, begin, end = self._passing.popleft()
            self._seconds[part] += begin.elapsed_time(end) / 1000
            self._spare += begin, end

    def take(self) -> dict[str, float]:
        """Seconds of every part since the last call; waits until the GPU has done what was asked of it."""
        if self._passing:
            self._passing[-1][2].synchronize()
            self.collect()
        taken, self._seconds = self._seconds, defaultdict(float)
        return dict(taken)
