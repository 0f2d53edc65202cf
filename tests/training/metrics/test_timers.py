"""Timers use the clock on a CPU and events on a GPU, and never wait inside a step."""

import time
from typing import Any

import pytest
import torch

from training.metrics.timers import Timers


def test_parts_add_up_by_name_and_may_be_nested() -> None:
    timers = Timers(torch.device("cpu"))
    for _ in range(2):
        with timers("both"):
            with timers("first"):
                time.sleep(0.004)
            with timers("second"):
                time.sleep(0.008)
    timers.collect()
    taken = timers.take()
    assert taken["first"] >= 0.008 and taken["second"] >= 0.016
    assert taken["both"] >= taken["first"] + taken["second"]
    assert timers.take() == {}  # starts from 0 again


class Stream:
    """A fake GPU stream whose clock advances only when it is synchronised: 10 ms per event."""

    def __init__(self) -> None:
        self.made = self.recorded = self.passed = 0

    def __call__(self, enable_timing: bool) -> Any:
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def record(self) -> None:
        self.stream.recorded += 1
        self.at = self.stream.recorded

    def query(self) -> bool:
        return self.at <= self.stream.passed

    def synchronize(self) -> None:
        self.stream.passed = max(self.stream.passed, self.at)

    def elapsed_time(self, end: "Event") -> float:
        assert end.query(), "read before the GPU had passed it"
        return 10.0 * (end.at - self.at)


def test_only_take_waits_for_the_gpu_and_events_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr("training.metrics.timers.Event", stream)
    timers = Timers(torch.device("cuda"))
    for _ in range(2):
        passed = stream.passed
        for _ in range(3):
            with timers("both"), timers("first"):
                pass
            timers.collect()
        assert stream.passed == passed  # three steps, and nothing waited
        assert timers.take() == pytest.approx({"first": 0.03, "both": 0.09})
    assert stream.made == 12
