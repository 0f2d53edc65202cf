import os
import signal
from pathlib import Path

import pytest

from common import cli
from common.errors import InputError


def send(*numbers: signal.Signals) -> int:
    for number in numbers:
        os.kill(os.getpid(), number)
    return 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_unwinds_the_step_and_gives_its_exit_code_whatever_the_unwinding_meets(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned = []

    def main() -> int:
        try:
            return send(number)
        finally:
            try:
                raise ValueError("what a clean-up meets")
            except ValueError:
                send(signal.SIGTERM)  # the clean-up is not cut short
            cleaned.append(True)

    def fail() -> int:
        try:
            return send(signal.SIGHUP)
        finally:
            raise OSError("the terminal is gone")

    assert cli.run(main) == 128 + number and cleaned
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert cli.run(fail) == 129
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_signals_that_others_ignore_or_handle_stay_theirs(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGHUP, handler)  # nohup, submitit
    try:
        assert cli.run(lambda: send(signal.SIGHUP)) == 0
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)
    assert cli.run(lambda: int(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL), signals=False) == 1


def test_a_mistake_of_the_user_is_one_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise InputError("none.txt:2: bad")

    for main in (fail, lambda: len((tmp_path / "none.txt").read_bytes())):
        assert cli.run(main) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "none.txt" in line
    with pytest.raises(ZeroDivisionError):
        cli.run(lambda: 1 // 0)
