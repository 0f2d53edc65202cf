import os
from pathlib import Path

import pytest

from common.errors import InputError
from common.files import check_outputs


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a").write_text("a")
    os.link("a", "hard")
    Path("soft").symlink_to("a")
    Path("dangling").symlink_to("new")
    Path("deep").mkdir()
    Path("round").symlink_to("deep")


@pytest.mark.parametrize(
    "pair",
    [
        *(("a", "deep/../a"), ("a", "soft"), ("a", "hard"), ("new", "dangling"), ("new", "new")),
        ("deep/x", "round/x"),
    ],
)
def test_two_outputs_that_are_one_file_are_refused(pair: tuple[str, str]) -> None:
    for one, other in (pair, pair[::-1]):
        with pytest.raises(InputError, match=f"^{Path(other)}: .*{Path(one)}"):
            check_outputs([Path(one), None, Path(other)])


@pytest.mark.parametrize("name", ["a", "./a", "soft", "hard", "deep/../a"])
def test_an_output_that_is_an_input_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"^{Path(name)}: .*input a"):
        check_outputs([Path(name)], [Path("a")])
