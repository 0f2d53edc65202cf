"""A checkpoint folder that holds foreign files is never removed."""

from pathlib import Path

import pytest

from training.checkpoint.lookup import _remove, discard


@pytest.mark.parametrize("foreign", ["notes.txt", "merged/config.json", "model.distcp", ""])
def test_a_folder_with_a_foreign_file_stays_and_one_with_only_ours_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], foreign: str
) -> None:
    for remove in (_remove, discard):
        folder = tmp_path / f"iter_{len(list(tmp_path.iterdir())):07}"
        for name in ("rank_0_0.safetensors", "tensors.json", "tensors.json.tmp", "manifest.json", foreign):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if name:
                (folder / name).write_text("x")
        before = sorted(folder.rglob("*"))
        remove(folder)
        assert sorted(folder.rglob("*")) == (before if foreign else [])
        assert folder.exists() == bool(foreign) and foreign.partition("/")[0] in capsys.readouterr().err
