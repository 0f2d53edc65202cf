"""Parsing the DAG writes nothing, and a job runs with the settings that it was planned with."""

import fcntl
import re
from pathlib import Path
from types import SimpleNamespace as Names
from typing import Any

import pytest
import yaml

from common.config import JOB_SETTINGS, load_settings
from common.errors import ConfigError
from common.files import read_json
from common.settings import Settings
from tests.workflow.pipeline import LINKED, ROOT, snakemake
from workflow.snakefile import prepare_run, print_results, settings_of_job

SENTENCES = "A sentence of English words that is long enough to be told as English by anybody who reads it."
CLEAN = "results/x/clean/0000.jsonl.zst"
JOB = ("--mode", "remote", "--target-jobs", "clean:shard=0000", "--allowed-rules", "clean", "--executor", "local")
JOB = (*JOB, "--cores", "1", "--force", "--nolock", "--no-hooks", "--ignore-incomplete")  # as an executor calls it


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_parsing_writes_nothing_and_a_job_keeps_the_settings_it_was_planned_with(tmp_path: Path) -> None:
    for name in LINKED:
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text(SENTENCES)
    config: dict[str, Any] = {"run": "results/x", "sources": [{"path": "texts"}], "clean": {"min_characters": 5}}
    (tmp_path / "config.yaml").write_bytes(b"\xef\xbb\xbf" + yaml.safe_dump(config).encode())
    run = tmp_path / "results/x"

    # the command line reads values as the file does
    done = snakemake(tmp_path, CLEAN, "--config", "clean={language: no}", "generate={prompt: 1:30}", "site=")
    assert done.returncode == 0, done.stdout + done.stderr
    (planned,) = (run / "settings").iterdir()
    settings = load_settings(planned)
    assert load_settings(run / "config.yaml") == settings
    assert (settings.clean.language, settings.generate.prompt, settings.clean.min_characters) == ("no", "1:30", 5)
    assert read_json(run / "clean/0000.stats.json")["reasons"] == {"language": 1}

    # another configuration with the same `run`: a dry run, and one refused by the lock
    before = contents(run)
    other = config | {"shards": 3, "clean": {"min_characters": 5000}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(other))
    dry = snakemake(tmp_path, CLEAN, "-n", "--quiet")
    assert dry.returncode == 0 and re.search(r"^ingest +1\nclean +1$", dry.stdout, re.MULTILINE), dry.stdout
    assert contents(run) == before
    with open(run / "records/lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = snakemake(tmp_path, CLEAN)
    assert refused.returncode != 0 and "results/x is locked" in refused.stdout + refused.stderr
    assert contents(run) == before

    # a job that was queued before the file was edited
    (run / "clean/0000.stats.json").unlink()
    job = snakemake(tmp_path, *JOB, **{JOB_SETTINGS: str(planned.relative_to(tmp_path))})
    assert job.returncode == 0, job.stdout + job.stderr
    assert read_json(run / "clean/0000.stats.json")["reasons"] == {"language": 1}
    with pytest.raises(ConfigError, match=JOB_SETTINGS):
        settings_of_job({})


def test_a_wrong_configuration_stops_snakemake_before_any_job(tmp_path: Path) -> None:
    for name in (*LINKED, "config.yaml"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "tab.yaml").write_text("run: x\n\tsources: []")
    (tmp_path / "file.yaml").write_text("run: tab.yaml\nsources: [{path: tab.yaml}]")
    wrong: tuple[tuple[tuple[str, ...], str], ...] = (
        (("--config", "shards=0"), "config.yaml: shards: "),
        (("--configfile", "tab.yaml"), "tab.yaml:2: not valid"),
        (("-n", "--configfile", "file.yaml"), "run: tab.yaml: "),
    )
    for given, said in wrong:
        result = snakemake(tmp_path, "all", *given)
        (line,) = [line for line in result.stderr.splitlines() if "profile" not in line]
        assert result.returncode == 2 and line.startswith(f"error: {said}"), result.stderr
    assert not (tmp_path / "results").exists()


def test_a_run_ends_with_the_paths_of_its_report_and_models(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = {"report": {"page": "x/report.html"}, "merge": {"config": "x/merged/tiny/config.json"}, "train": {}}
    jobs = [Names(rule=Names(name=name), output=Names(**output)) for name, output in outputs.items()]
    print_results(Names(dag=Names(jobs=jobs)))
    assert capsys.readouterr().out == "report: x/report.html\nmodel:  x/merged/tiny\n"


def test_another_member_of_the_group_may_start_the_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the owner of a file may change its mode."""
    (tmp_path / "urls.txt").touch()
    settings = Settings(run=tmp_path / "run", urls=[str(tmp_path / "urls.txt")])
    prepare_run(settings)
    monkeypatch.setattr(Path, "chmod", lambda *_: pytest.fail("not permitted"))
    prepare_run(settings)
