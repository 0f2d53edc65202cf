"""Parsing the DAG writes nothing, and a job runs with the settings that it was planned with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from common.config import JOB_SETTINGS, load_settings
from common.files import read_json
from tests.conftest import ROOT
from tests.helpers import prose, read_shard

SENTENCES = "A sentence of English words that is long enough to be told as English by anybody who reads it."


def lay_out(folder: Path, **more: object) -> Path:
    """A working folder with our rules, a text and a configuration; returns the run's folder."""
    for name in ("Snakefile", "workflow", "profiles"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text(SENTENCES)
    config = {"run": "results/x", "sources": [{"path": "texts"}], "clean": {"min_characters": 5}, **more}
    (folder / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    return folder / "results" / "x"


def snakemake(folder: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    inherited = {name: value for name, value in os.environ.items() if name != JOB_SETTINGS}
    return subprocess.run(
        [sys.executable, "-m", "snakemake", *arguments],
        cwd=folder,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


CLEAN = "results/x/clean/0000.jsonl.zst"
JOB = ("--mode", "remote", "--target-jobs", "clean:shard=0000", "--allowed-rules", "clean", "--executor", "local")
JOB = (*JOB, "--cores", "1", "--force", "--nolock", "--no-hooks", "--ignore-incomplete")  # as an executor calls it


def test_parsing_writes_nothing_and_a_job_keeps_the_settings_it_was_planned_with(tmp_path: Path) -> None:
    run = lay_out(tmp_path)
    done = snakemake(tmp_path, CLEAN)
    assert done.returncode == 0, done.stdout + done.stderr
    (planned,) = (run / "settings").iterdir()
    assert load_settings(planned).clean.min_characters == 5
    assert load_settings(run / "config.yaml") == load_settings(planned)

    # another configuration with the same `run`: a dry run, one refused by the lock, and a drawing of the DAG
    before = contents(run)
    other = yaml.safe_load((tmp_path / "config.yaml").read_text()) | {"shards": 3, "clean": {"min_characters": 5000}}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(other))
    locks = tmp_path / ".snakemake" / "locks"
    for arguments in (("-n",), ("--lint",)):
        snakemake(tmp_path, CLEAN, "--configfile", "other.yaml", *arguments)
        assert contents(run) == before, arguments
    locks.mkdir(exist_ok=True)
    (locks / "0.output.lock").write_text(f"{CLEAN}\n")
    refused = snakemake(tmp_path, CLEAN, "--configfile", "other.yaml")
    assert refused.returncode != 0 and "lock" in (refused.stdout + refused.stderr).lower()
    assert contents(run) == before
    (locks / "0.output.lock").unlink()

    # the file is edited while jobs are queued
    (tmp_path / "config.yaml").write_text((tmp_path / "other.yaml").read_text())
    job = snakemake(tmp_path, *JOB, **{JOB_SETTINGS: str(planned.relative_to(tmp_path))})
    assert job.returncode == 0, job.stdout + job.stderr
    assert read_json(run / "clean" / "0000.stats.json")["documents_out"] == 1
    # without the environment variable the job fails instead of guessing
    job = snakemake(tmp_path, *JOB)
    assert job.returncode == 2
    assert f"error: {JOB_SETTINGS} is not set: the job did not get the environment" in job.stderr
    planned.chmod(0o644)
    planned.write_text(planned.read_text() + "\n")
    job = snakemake(tmp_path, *JOB, **{JOB_SETTINGS: str(planned.relative_to(tmp_path))})
    assert job.returncode == 2 and "was changed after the run was planned" in job.stderr


ODD = 'o\'d "q" $HOME *[x]? ü;&#~!\\b --x'


def test_a_run_may_have_any_name_that_snakemake_can_hold(tmp_path: Path) -> None:
    odd = tmp_path / "w"
    odd.mkdir()
    name = f"{ODD}/my run"
    lay_out(odd, run=name, dedup={"jobs": 2}, tokenize={"min_tokens": 5}, clean={"min_characters": 5})
    (odd / "texts" / "b [y].txt").write_text(prose(1))
    (odd / "sets [z]").mkdir()
    (odd / "sets [z]" / "s $t.txt").write_text(SENTENCES)
    config = yaml.safe_load((odd / "config.yaml").read_text())
    config |= {"sources": [{"path": "texts/b [y].txt"}], "decontaminate": {"files": ["sets [z]/s $t.txt"]}}
    (odd / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    result = snakemake(odd, "dataset")
    assert result.returncode == 0, result.stdout + result.stderr
    run = odd / name
    assert [document["text"] for document in read_shard(run / "decontaminate/0000.jsonl.zst")] == [prose(1)]
    assert (run / "dataset/corpus_text_document.bin").stat().st_size > 0
    assert {path.name for path in odd.iterdir()} == {
        *("Snakefile", "workflow", "profiles", ".snakemake", "config.yaml", "texts", "sets [z]", ODD.split("/")[0]),
    }, "nothing beside it"
    assert "Nothing to be done" in (again := snakemake(odd, "dataset", "-n")).stdout + again.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: 'a{b}'\nsources: [{path: texts}]", "run: 'a{b}': braces are wildcards to Snakemake"),
        ("run: x\nrun: y\n", "config.yaml:2: not valid YAML: key 'run' is given twice"),
        ("run: x\n\tsources: []", "config.yaml:2: not valid YAML"),
        ("", "config.yaml: empty configuration file"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    lay_out(tmp_path)
    (tmp_path / "config.yaml").write_text(text)
    result = snakemake(tmp_path, "-n")
    (line,) = [line for line in result.stderr.splitlines() if "profile" not in line]
    assert result.returncode == 2 and line.startswith("error: ") and message in line


def test_the_command_line_reads_values_as_the_file_does(tmp_path: Path) -> None:
    run = lay_out(tmp_path)
    (tmp_path / "config.yaml").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "config.yaml").read_bytes())
    result = snakemake(tmp_path, CLEAN, "--config", "clean={language: no}", "generate={prompt: 1:30}", "site=")
    assert result.returncode == 0, result.stdout + result.stderr
    settings = load_settings(run / "config.yaml")
    assert (settings.clean.language, settings.generate.prompt, settings.clean.min_characters) == ("no", "1:30", 5)
    assert json.loads((run / "clean/0000.stats.json").read_text())["reasons"] == {"language": 1}
    (tmp_path / "config.yaml").write_bytes(b"run: x\nsources: []\n# caf\xe9\n")
    result = snakemake(tmp_path, "-n")
    assert result.returncode == 2 and "config.yaml:3: not UTF-8; save the file as UTF-8" in result.stderr
