import shutil
from pathlib import Path

import pytest
import yaml

from cluster import submission
from cluster.submission import make_snapshot
from tests.cluster.helpers import settings
from tests.conftest import ROOT


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small copy of the code that snapshots are made of."""
    folder = tmp_path / "sources"
    for package in submission.PACKAGES:
        (folder / package).mkdir(parents=True)
        shutil.copy(ROOT / package / "__init__.py", folder / package)
    monkeypatch.setattr(submission, "_ROOT", folder)
    return folder


def test_a_snapshot_keeps_the_code_and_the_settings_of_its_day(tmp_path: Path, sources: Path) -> None:
    (sources / ".commit").write_text("abc123")
    source = sources / "training" / "trainer.py"
    source.write_text("old")
    first = make_snapshot(settings(tmp_path / "run"), tmp_path)
    assert (first / "code" / ".commit").read_text() == "abc123"
    (sources / "training" / "__pycache__").mkdir()
    (sources / "training" / "__pycache__" / "trainer.pyc").write_bytes(b"compiled")
    assert make_snapshot(settings(tmp_path / "run"), tmp_path) == first and not list(first.rglob("__pycache__"))
    source.write_text("new")
    unfinished = first.with_name(f"{make_snapshot(settings(tmp_path / 'run'), tmp_path).name}.tmp")
    unfinished.with_suffix("").rename(unfinished)
    (unfinished / "code" / "half.py").touch()
    second = make_snapshot(settings(tmp_path / "run"), tmp_path)
    third = make_snapshot(settings(tmp_path / "other"), tmp_path)
    assert len({first, second, third}) == 3 and not (second / "code" / "half.py").exists()
    assert [(path / "code/training/trainer.py").read_text() for path in (first, second, third)] == ["old", "new", "new"]
    assert yaml.safe_load((first / "settings.yaml").read_text())["run"] == str(tmp_path / "run")
