"""A checkpoint folder that holds foreign files is never removed."""

from pathlib import Path

import pytest

from training.checkpoint import retention
from training.checkpoint.retention import discard


def checkpoint_folder(path: Path) -> Path:
    path.mkdir()
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"):
        (path / name).write_text("x")
    return path


def test_a_folder_with_a_foreign_file_stays_and_one_with_only_ours_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("notes.txt", "merged/config.json", "model.distcp"):
        folder = checkpoint_folder(tmp_path / "iter_0000010")
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
        before = sorted(folder.rglob("*"))
        retention._remove(folder)
        discard(folder)
        assert sorted(folder.rglob("*")) == before
        assert name.partition("/")[0] in capsys.readouterr().err
        folder.rename(tmp_path / name.replace("/", "-"))
    ours = [checkpoint_folder(tmp_path / name) for name in ("iter_0000010", "iter_0000020.old.tmp")]
    (ours[1] / ".metadata.tmp").write_text("x")
    retention._remove(ours[0])
    discard(ours[1])
    assert not list(tmp_path.glob("iter_*"))
