import hashlib
import os
import platform
import socket
import subprocess
from pathlib import Path

import pytest

from common import snakefile
from common.config import validate
from common.files import read_json
from common.run_card import commit, seeds


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", folder, "-c", "user.name=n", "-c", "user.email=e@example.org", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_is_that_of_the_code_or_of_what_it_was_copied_from(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code.py").write_text("1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    assert commit(tmp_path) == git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "code.py").write_text("2\n")
    assert commit(tmp_path) == f"{git(tmp_path, 'rev-parse', 'HEAD')}-dirty"
    (tmp_path / ".commit").write_text("abc\n")
    assert commit(tmp_path) == "abc"


def test_a_run_that_starts_gets_a_card_that_says_who_made_it_with_what(
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
    card, resolved = read_json(tmp_path / "run" / "run.json"), snakefile.settings_path(settings)
    assert card["host"] == socket.gethostname() and card["folder"] == os.getcwd()
    assert card["versions"]["python"] == platform.python_version() and card["versions"]["torch"]
    assert tmp_path / "run" / card["settings"]["path"] == resolved
    assert card["settings"]["sha256"] == hashlib.sha256(resolved.read_bytes()).hexdigest()
    digest = hashlib.sha256(b"a text").hexdigest()
    assert [(entry["path"], entry["sha256"]) for entry in card["inputs"]] == [(str(text), digest)]
    assert card["seeds"]["models.tiny.train.seed"] == 7 and "dedup.seed" in card["seeds"]
    assert card["seeds"] == seeds(settings.model_dump())
