"""Timers use the clock on a CPU and events on a GPU, and never wait inside a step."""

import time

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
