import hashlib
import os
import platform
import socket
from pathlib import Path

import pytest

from common.config import validate
from common.files import read_json
from workflow import snakefile


def test_a_run_that_starts_gets_a_card_that_says_who_made_it_with_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts/more").mkdir(parents=True)
    text = tmp_path / "texts/more/a.txt"
    text.write_text("a text")
    tiny = {"model": {"n_layer": 1, "n_head": 1, "n_embd": 8}, "train": {"iterations": 5, "seed": 7}}
    raw = {"run": str(tmp_path / "run"), "sources": [{"path": str(tmp_path / "texts")}], "models": {"tiny": tiny}}
    settings = validate(raw, "test")
    snakefile.prepare_run(settings)
    card, resolved = read_json(tmp_path / "run" / "run.json"), snakefile.settings_path(settings)
    assert card["host"] == socket.gethostname() and card["folder"] == os.getcwd()
    assert card["versions"]["python"] == platform.python_version() and card["versions"]["torch"]
    assert tmp_path / "run" / card["settings"]["path"] == resolved
    assert card["settings"]["sha256"] == hashlib.sha256(resolved.read_bytes()).hexdigest()
    assert [(entry["path"], entry["size"]) for entry in card["inputs"]] == [(str(text), 6)]
