import os
import signal
import threading
from contextlib import suppress

import pytest

from common import cli


def send(*numbers: signal.Signals) -> int:
    for number in numbers:
        os.kill(os.getpid(), number)
    return 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_the_step_and_gives_its_exit_code(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned = []

    def main() -> int:
        try:
            return send(number)
        finally:
            send(number, signal.SIGTERM)  # the clean-up is not cut short
            cleaned.append(True)

    assert cli.run(main) == 128 + number and cleaned
    assert capsys.readouterr().err == f"ended by {number.name}\n"
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_second_signal_of_another_kind_does_not_cut_short_the_clean_up(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        try:
            return send(signal.SIGINT)
        finally:
            try:
                raise ValueError("what a clean-up meets")
            except ValueError:
                send(signal.SIGTERM)

    assert cli.run(main) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_error_that_the_unwinding_meets_does_not_hide_the_signal() -> None:
    def main() -> int:
        try:
            return send(signal.SIGHUP)
        finally:
            raise OSError("the terminal is gone")

    assert cli.run(main) == 129


def test_a_signal_that_a_library_swallows_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_AGAIN", 0.01)

    def main() -> int:
        with suppress(BaseException):
            send(signal.SIGTERM)
        return int(threading.Event().wait(60))

    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout's
    try:
        assert cli.run(main) == 143
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_signals_that_others_ignore_or_handle_stay_theirs(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGHUP, handler)  # nohup, submitit
    try:
        assert cli.run(lambda: send(signal.SIGHUP)) == 0
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_main_that_handles_them_itself_is_left_alone() -> None:
    assert cli.run(lambda: int(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL), signals=False) == 1
