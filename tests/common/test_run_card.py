import hashlib
import json
import os
import platform
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from common import snakefile
from common.config import validate
from common.run_card import commit, seeds, write_card


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    command = ["git", "-C", folder, *who, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def read(path: Path) -> dict[str, Any]:
    card: dict[str, Any] = json.loads(path.read_text())
    return card


def test_a_card_says_who_made_a_result_when_and_with_what(tmp_path: Path) -> None:
    settings = tmp_path / "settings" / "0.yaml"
    settings.parent.mkdir()
    settings.write_text("run: x\n")
    write_card(tmp_path / "run.json", settings=settings, seeds={"dedup.seed": 1}, processes=2)
    card = read(tmp_path / "run.json")
    assert card["host"] == socket.gethostname() and card["folder"] == os.getcwd()
    assert card["versions"]["python"] == platform.python_version() and card["versions"]["torch"]
    assert abs((datetime.now(UTC) - datetime.fromisoformat(card["started"])).total_seconds()) < 60
    assert card["settings"] == {"path": "settings/0.yaml", "sha256": hashlib.sha256(b"run: x\n").hexdigest()}
    assert card["seeds"] == {"dedup.seed": 1} and card["processes"] == 2 and card["inputs"] == []


def test_the_commit_is_that_of_the_code_or_of_what_it_was_copied_from(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code.py").write_text("1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    assert commit(tmp_path) == git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "code.py").write_text("2\n")
    assert commit(tmp_path) == f"{git(tmp_path, 'rev-parse', 'HEAD')}-dirty"
    copy = tmp_path / "snapshots"
    copy.mkdir()
    assert commit(copy) is None, "the repository around a copy may be at another commit"
    (copy / ".commit").write_text("abc\n")
    assert commit(copy) == "abc"


def test_a_run_that_starts_gets_a_card_with_its_seeds_and_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts/more").mkdir(parents=True)
    text = tmp_path / "texts/more/a.txt"
    text.write_text("a text")
    tiny = {"model": {"n_layer": 1, "n_head": 1, "n_embd": 8}, "train": {"iterations": 5, "seed": 7}}
    raw = {"run": str(tmp_path / "run"), "sources": [{"path": str(tmp_path / "texts")}], "models": {"tiny": tiny}}
    monkeypatch.setattr("common.snakemake_lock.has_lock", lambda: None)
    settings = validate(raw, "test")
    snakefile.prepare_run(settings)
    card = read(tmp_path / "run" / "run.json")
    assert (tmp_path / "run" / card["settings"]["path"]) == snakefile.settings_path(settings)
    digest = hashlib.sha256(b"a text").hexdigest()
    assert [(entry["path"], entry["sha256"]) for entry in card["inputs"]] == [(str(text), digest)]
    assert card["seeds"]["models.tiny.train.seed"] == 7 and "dedup.seed" in card["seeds"]
    assert card["seeds"] == seeds(settings.model_dump())
