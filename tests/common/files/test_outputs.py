import os
import sys
from pathlib import Path

import pytest

from common.errors import InputError
from common.files import check_outputs, is_stdout
from common.files.outputs import descriptor_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a").write_text("a")
    os.link("a", "hard")
    Path("soft").symlink_to("a")
    Path("dangling").symlink_to("new")
    Path("deep").mkdir()
    Path("round").symlink_to("deep")
    os.mkfifo("pipe")
    return tmp_path


@pytest.mark.parametrize(
    "pair",
    [
        ("a", "./a"), ("a", "deep/../a"), ("a", "soft"), ("a", "hard"), ("new", "dangling"), ("new", "new"),
        ("deep/x", "round/x"), ("x", "x.tmp"), ("a.tmp", "soft"), ("pipe", "pipe"),
    ],
)  # fmt: skip
def test_two_outputs_that_are_one_file_are_refused(pair: tuple[str, str]) -> None:
    for one, other in (pair, pair[::-1]):
        with pytest.raises(InputError, match=f"^{Path(other)}: is the same file as the output {Path(one)}"):
            check_outputs([Path(one), None, Path(other)])


@pytest.mark.parametrize("name", ["a", "./a", "soft", "hard", "deep/../a"])
def test_an_output_that_is_an_input_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"^{Path(name)}: would overwrite the input a"):
        check_outputs([Path(name)], [Path("a")])
    Path("b.tmp").write_text("")
    with pytest.raises(InputError, match=r"^b: would overwrite the input b\.tmp"):
        check_outputs([Path("b")], [Path("b.tmp")])


def test_different_files_and_devices_may_be_named_together() -> None:
    check_outputs([Path("new"), Path("other"), Path("deep/new")], [Path("a"), Path("absent")])
    check_outputs([Path("/dev/null"), Path("/dev/null")], [Path("/dev/null"), Path("-")])


def test_descriptors_are_known_by_all_their_names(tmp_path: Path) -> None:
    Path("out").symlink_to("/dev/stdout")
    for name in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", f"/proc/{os.getpid()}/fd/1", "/dev/../dev/fd/1", "out"):
        assert descriptor_of(Path(name)) == 1, name
    for name in ("a", "soft", "1", "/dev/null", "/proc/1/fd/1", "/dev/fd", "absent/1"):
        assert descriptor_of(Path(name)) is None, name
    assert not is_stdout(Path("a")) and not is_stdout(Path("/dev/full"))
    assert sys.stdout is not None
