"""A folder is replaced as a whole, or stays as it was."""

from pathlib import Path

import pytest

from common.errors import InputError
from common.folders import replace_folder, swap_folder


def folder(path: Path, content: str) -> Path:
    path.mkdir(parents=True)
    (path / "file").write_text(content)
    return path


def refuse(*_folders: Path) -> None:
    raise InputError("not ours")


def test_a_swap_keeps_the_older_folder_under_another_name_or_restores_it(tmp_path: Path) -> None:
    new, old = folder(tmp_path / "new", "new"), folder(tmp_path / "result", "old")
    with pytest.raises(InputError):
        swap_folder(new, old, tmp_path / "aside", refuse)
    with pytest.raises(FileNotFoundError):
        swap_folder(tmp_path / "absent", old, tmp_path / "aside")
    assert (old / "file").read_text() == "old" and not (tmp_path / "aside").exists()
    swap_folder(new, old, tmp_path / "aside")
    assert (old / "file").read_text() == "new" and (tmp_path / "aside/file").read_text() == "old"


def test_a_replaced_folder_is_gone_and_a_refused_one_or_one_that_is_being_written_stays(tmp_path: Path) -> None:
    result = tmp_path / "deep/result"
    for content in ("first", "second"):
        with replace_folder(result, lambda old, new: None) as new:
            folder(new / "inner", content)
            (new / "file").write_text(content)
            with pytest.raises(InputError, match="result: "), replace_folder(result, lambda old, new: None):
                pass
    with pytest.raises(InputError), replace_folder(result, refuse) as new:
        (new / "file").write_text("third")
    assert (result / "file").read_text() == "second"
    assert [path.name for path in result.parent.iterdir()] == ["result"]


def test_what_a_killed_command_left_is_removed_and_the_older_folder_put_back(tmp_path: Path) -> None:
    result = tmp_path / "result"
    folder(tmp_path / "result.partial/new", "half")
    folder(tmp_path / "result.partial/old", "older")
    folder(tmp_path / "result.partial/mine", "mine")
    (tmp_path / "result.partial/lock").touch()
    with pytest.raises(InputError), replace_folder(result, refuse):
        pass
    assert (result / "file").read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result", "result.partial"]
