"""The four changes that CONTRIBUTING.md shows, applied to a copy of the code and run as the page
says.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.helpers import document, prose, read_shard, write_shard
from tests.warc_records import http, record, write_warc
from workflow.demo.pages import Host, page_html

SECTIONS = dict(
    section.split("\n", 1)
    for section in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("\\\n", " ").split("\n## ")[1:]
)


def apply(title: str, folder: Path) -> None:
    """Apply a section's diff: each hunk's old lines occur once in its file, and become the new
    ones.
    """
    (diff,) = re.findall(r"```diff\n(.*?)```", SECTIONS[title], re.DOTALL)
    assert 0 < sum(line.startswith("+") for line in diff.splitlines()) < 20
    for part in diff.split("--- ")[1:]:
        name, *hunks = re.split(r"\n@@", part)
        path = folder / name
        text = path.read_text(encoding="utf-8")
        for hunk in hunks:
            lines = hunk.strip("\n").split("\n")
            old = "\n".join(line[1:] for line in lines if not line.startswith("+"))
            new = "\n".join(line[1:] for line in lines if not line.startswith("-"))
            assert text.count(old) == 1, f"{name}: {old}"
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")


def run_example(title: str, folder: Path) -> str:
    """Run the command of a section in the copy; returns what it printed."""
    (command,) = re.findall(r"^    python (-m .*)$", SECTIONS[title], re.MULTILINE)
    words, environment = [sys.executable, *shlex.split(command)], {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_changes_that_the_page_shows_work(tmp_path: Path) -> None:
    for name in ("common", "corpus", "cluster", "training", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for title in ("Add a filter", "Add a source format", "Add an extractor", "Add a model size"):
        apply(title, tmp_path)

    write_shard(tmp_path / "pages.jsonl.zst", [document(1, f"{prose(1)}\n" * 3), document(2, prose(2))])
    assert "1 repeated_lines" in run_example("Add a filter", tmp_path)
    assert [kept["id"] for kept in read_shard(tmp_path / "clean.jsonl.zst")] == [document(2, "")["id"]]

    (tmp_path / "jokes.fortune").write_text(f"{prose(4)}\n%\n{prose(5)}\nMore.\n%\n{prose(6)}\n")
    run_example("Add a source format", tmp_path)
    found = [(read["text"].strip(), read["origin"]) for read in read_shard(tmp_path / "documents.jsonl.zst")]
    texts = (prose(4), f"{prose(5)}\nMore.", prose(6))
    assert found == [(text, f"jokes.fortune:{line}") for text, line in zip(texts, (1, 3, 6), strict=True)]

    page = page_html(Host("one.example", "The One", "", ("Home",), "main"), "Story", prose(3), number=1)
    write_warc(tmp_path / "raw.warc.gz", record("https://one.example/1", http(page.encode())))
    run_example("Add an extractor", tmp_path)
    (found,) = read_shard(tmp_path / "pages.jsonl.zst")
    assert found["extractor"] == "article" and prose(3)[:100] in found["text"]

    script = run_example("Add a model size", tmp_path)
    assert "#SBATCH --nodes=2\n" in script and "#SBATCH --ntasks-per-node=8\n" in script
