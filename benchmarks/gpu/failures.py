"""A pytest plugin that prints each failure as soon as it happens: the run may be ended before pytest's summary."""

from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    """Called for each phase of a test, with xdist in the process that collects the results."""
    if report.failed:
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)
