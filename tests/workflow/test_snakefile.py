"""Parsing the DAG writes nothing, and a job runs with the settings that it was planned with."""

import fcntl
import json
import re
from pathlib import Path
from types import SimpleNamespace as Names
from typing import Any

import pytest
import yaml

from common.config import JOB_SETTINGS, load_settings, merged
from common.errors import ConfigError, ToolkitError
from common.files import read_json
from common.settings import Settings
from corpus.text.filters import filters
from tests.workflow.pipeline import LINKED, ROOT, snakemake
from workflow.snakefile import (
    check_evaluation,
    check_files,
    check_model,
    check_names,
    prepare_run,
    print_results,
    settings_for_workflow,
    settings_of_job,
)

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


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("run: x\nrun: y\n", "config.yaml:2: not valid YAML: key 'run'"),
        ("run: x\n\tsources: []", "config.yaml:2: "),
        ("run: x\nsources: []\n# caf\xe9\n", "config.yaml:3: "),
        ("", "config.yaml: "),
        ("{run: x, scrpe: {}}", "unknown key 'scrpe'"),
        ("{run: x, sources: [{path: none}]}", "sources: none"),
        ("{run: x, sources: [{path: .}], decontaminate: {files: [none]}}", "decontaminate.files: none"),
    ],
)
def test_a_configuration_that_cannot_be_read_names_the_line_or_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError) as error:
        settings_for_workflow([Path("config.yaml")], [])
    assert named in str(error.value) and "\n" not in str(error.value)


NAMED = """
    blacklist: {domain_lists: [none]}                | blacklist.domain_lists: none: no such file
    blacklist: {domain_lists: [paths]}               | paths: 1 of 1 entries can never match
    site: none                                       | site: none: no such folder
    tokenize: {encoder_json: none, vocab_bpe: none}  | tokenize.encoder_json: none: no such file
    tokenize: {encoder_json: paths}                  | paths: not valid JSON
    tokenize: {vocab_bpe: paths}                     | paths: merges without a vocabulary
    evaluate: {tasks: [a], task_dir: folder}         | evaluate.task_dir: folder: holds no YAML
    cluster: {gpu: h1000}                            | 'h1000' (did you mean 'h100'?)
    cluster: {corpus: {partitions: {scrap: x}}}      | cluster.corpus.partitions: no rule 'scrap' (did you mean 'scrape'
    cluster: {corpus: {runtime_minutes: {train: 9}}} | cluster.corpus.runtime_minutes: no rule 'train'
    sources: [{path: a.parquet}]                     | a.parquet needs pyarrow; pip install
    evaluate: {tasks: [a]}                           | evaluate.tasks needs lm_eval; pip install
    clean: {filters: [c4]}                           | c4 needs spaCy; pip install
    clean: {fasttext: [{path: paths, label: x}]}     | clean.fasttext needs fasttext-predict; pip install
    models: {m: {log: {wandb: project}}}             | wandb is not installed: pip install
    models: {m: {data: []}}                          | model.vocab_size is 9, but the vocabulary of the corpus has 50257
    models: {m: {finetune: folder}}                  | models.m.finetune: folder/config.json: no such file
    models: {m: {finetune: pointer}}                 | pointer/model.safetensors: no safetensors file
"""
SIZES = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 9}


def test_everything_that_a_configuration_names_is_checked_before_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in ("workflow.snakefile", "corpus.text.filters", "training.metrics.boards"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    for name in ("folder", "pointer"):
        Path(name).mkdir()
    Path("paths").write_text("a/b\n")
    for name in ("a.parquet", "d.idx"):
        Path(name).touch()
    Path("pointer/config.json").write_text(json.dumps(SIZES | {"n_positions": 8}))
    Path("pointer/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")  # Git LFS
    models = {
        "m": {"model": SIZES | {"seq_len": 8}, "data": [{"prefix": "d", "weight": 1}], "train": {"iterations": 1}}
    }
    base = {"run": "x", "sources": [{"path": "paths"}], "models": models}
    for change, said in (line.split("|") for line in NAMED.strip().splitlines()):
        Path("config.yaml").write_text(yaml.safe_dump(merged(base, yaml.safe_load(change))))
        with pytest.raises(ToolkitError) as error:
            settings = settings_for_workflow([Path("config.yaml")], [])
            check_names(settings)
            check_files(settings)
            filters(settings.clean)
            check_evaluation(settings)
            check_model(settings, "m")
        assert said.strip() in str(error.value) and "\n" not in str(error.value), change


def test_a_wrong_configuration_stops_snakemake_before_any_job(tmp_path: Path) -> None:
    for name in (*LINKED, "config.yaml"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "tab.yaml").write_text("run: x\n\tsources: []")
    wrong = (("--config", "shards=0"), "config.yaml: shards: "), (("--configfile", "tab.yaml"), "tab.yaml:2: not valid")
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
