"""Everything that a configuration names is checked before any job, and so are the base runs."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml

from common.config import merged, write_settings
from common.errors import ConfigError, InputError, ToolkitError
from common.files import fingerprint, write_json
from common.settings import Settings, SourceSettings, TrainTokenizerSettings
from corpus.text.filters import filters
from tests.training.helpers import byte_documents, settings_of, write_config, write_corpus
from tests.workflow.test_base import finished
from workflow.checks import (
    check_base,
    check_crawl,
    check_evaluation,
    check_files,
    check_model,
    check_names,
    check_run,
    check_sources,
)
from workflow.snakefile import prepare_run, settings_for_workflow

NAMED = """
    blacklist: {domain_lists: [none]}                | blacklist.domain_lists: none: no such file
    blacklist: {domain_lists: [paths]}               | paths: 1 of 1 entries can never match
    site: none                                       | site: none: no such folder
    sources: [{path: none}]                          | sources: none: no such file
    decontaminate: {files: [none]}                   | decontaminate.files: none: no such file
    tokenize: {encoder_json: none, vocab_bpe: none}  | tokenize.encoder_json: none: no such file
    tokenize: {encoder_json: paths}                  | paths: not valid JSON
    tokenize: {vocab_bpe: paths}                     | paths: merges without a vocabulary
    evaluate: {tasks: [a], task_dir: folder}         | evaluate.task_dir: folder: holds no YAML
    cluster: {gpu: h1000}                            | 'h1000' (did you mean 'h100'?)
    cluster: {corpus: {partitions: {scrap: x}}}      | cluster.corpus.partitions: no rule 'scrap' (did you mean 'scrape'
    cluster: {corpus: {runtime_minutes: {train: 9}}} | cluster.corpus.runtime_minutes: no rule 'train'
    sources: [{path: a.parquet}]                     | a.parquet: needs pyarrow to be read; pip install
    sources: [{path: folder}]                        | folder/notes.md: text; set format
    evaluate: {tasks: [a]}                           | evaluate.tasks needs lm_eval; pip install
    clean: {filters: [c4]}                           | c4 needs spaCy; pip install
    clean: {fasttext: [{path: paths, label: x}]}     | clean.fasttext needs fasttext-predict; pip install
    models: {m: {log: {wandb: project}}}             | wandb is not installed: pip install
    models: {m: {data: []}}                          | model.vocab_size is 9, but the vocabulary of the corpus has 50257
    cluster: {min_nodes: 1}                          | cluster.min_nodes 1 needs cluster.executor slurm
    models: {m: {finetune: folder}}                  | models.m.finetune: folder/config.json: no such file
    models: {m: {finetune: pointer}}                 | pointer/model.safetensors: no safetensors file
"""
SIZES = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 9}


def test_everything_that_a_configuration_names_is_checked_before_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in ("workflow.checks", "corpus.text.filters", "training.metrics.boards"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("folder", "pointer"):
        Path(name).mkdir()
    Path("folder/notes.md").write_text("# Notes\n")
    Path("paths").write_text("a/b\n")
    for name in ("a.parquet", "d.idx"):
        Path(name).touch()
    Path("pointer/config.json").write_text(json.dumps(SIZES | {"n_positions": 8}))
    Path("pointer/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")  # Git LFS
    models = {
        "m": {"model": SIZES | {"seq_len": 8}, "data": [{"prefix": "d", "weight": 1}], "train": {"iterations": 1}}
    }
    base = {"run": "x", "sources": [{"path": "paths", "format": "text"}], "models": models}
    for change, said in (line.split("|") for line in NAMED.strip().splitlines()):
        Path("config.yaml").write_text(yaml.safe_dump(merged(base, yaml.safe_load(change))))
        with pytest.raises(ToolkitError) as error:
            settings = settings_for_workflow([Path("config.yaml")], [])
            check_names(settings)
            check_files(settings)
            check_sources(settings)
            filters(settings.clean)
            check_evaluation(settings)
            check_model(settings, "m")
        assert said.strip() in str(error.value) and "\n" not in str(error.value), change


def test_a_run_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "none")
    for run in (tmp_path, tmp_path / "a/b"):
        check_run(Settings(run=run, urls=["x"]))
    for name, said in {"file": "is not a folder", "file/x": "file is not a folder", "link": "is not a folder"}.items():
        with pytest.raises(ConfigError, match=f"^run: {tmp_path / name}: .*{said}"):
            check_run(Settings(run=tmp_path / name, urls=["x"]))
    with pytest.raises(ConfigError, match=r"^run: /proc/a/b: cannot be made in /proc: "):
        check_run(Settings(run="/proc/a/b", urls=["x"]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_base_that_cannot_be_extended_is_refused_before_any_job(tmp_path: Path) -> None:
    first, second, new = (tmp_path / name for name in ("first", "second", "new"))
    finished(first)
    finished(second, base=first)
    check_base(finished(new, base=[first, second]))
    vocabulary = tmp_path / "encoder.json"
    vocabulary.write_text("{}")
    refused: list[tuple[dict[str, object], str]] = [
        ({"base": new}, "this run itself"),
        ({"base": tmp_path / "none"}, "no run there"),
        ({"base": second}, f"extends {first}; name that run"),
        ({"base": first, "dedup": {"bands": 21}}, f"dedup.bands is 21, but {first}.*has 20"),
        ({"base": first, "tokenize": {"append_eod": False}}, "append_eod is False.*has True"),
        ({"base": first, "tokenize": {"encoder_json": vocabulary}}, "encoder_json is .*has GPT-2's"),
    ]
    for more, message in refused:
        with pytest.raises(ConfigError, match=message):
            check_base(finished(new, **more))
    (first / "dataset/stats.json").unlink()
    with pytest.raises(ConfigError, match=r"first: dataset/stats\.json is missing; finish that run"):
        check_base(finished(new, base=first))


def test_a_crawl_of_another_number_of_shards_stops_the_run_until_it_is_moved_away(tmp_path: Path) -> None:
    (tmp_path / "urls.txt").touch()
    base = Settings(run=tmp_path / "run", urls=[str(tmp_path / "urls.txt")])
    one, two, four = (base.model_copy(update={"shards": shards}) for shards in (1, 2, 4))
    base.run.mkdir()
    prepare_run(two)
    check_crawl(four)  # nothing is crawled yet
    (base.run / "pages/0001.warc.gz").touch()
    check_crawl(two)
    for settings in (one, four):
        with pytest.raises(ConfigError, match="shards: 2"):
            check_crawl(settings)
    (base.run / "pages").rename(base.run / "pages-2")
    check_crawl(four)


def test_sources_are_read_before_ingest_and_not_again_until_they_change(tmp_path: Path) -> None:
    notes, run = tmp_path / "texts/notes.md", tmp_path / "run"
    notes.parent.mkdir()
    notes.write_text("# Notes\n")
    settings = Settings(run=run, sources=[SourceSettings(path=str(notes.parent))])
    others = [SourceSettings(path=str(notes.parent), text_key="body")]
    refused = partial(pytest.raises, InputError, match=r"notes\.md: text; set format")
    with refused():
        check_sources(settings)
    write_settings(settings, run / "config.yaml")
    write_json(
        run / "ingest/stats.json", {"inputs": {str(path): fingerprint(path) for path in (notes, run / "config.yaml")}}
    )
    check_sources(settings)
    check_sources(Settings(run=tmp_path / "next", base=run, sources=others))
    with refused():
        check_sources(settings.model_copy(update={"sources": others}))
    notes.write_text("# Other notes\n")
    with refused():
        check_sources(settings)
    (run / "ingest/stats.json").write_bytes(bytes(9))
    with refused():
        check_sources(settings)
    check_sources(Settings(run=notes.parent, sources=settings.sources))  # the run makes it yet


def test_a_text_that_would_be_read_too_often_is_noted_once_there_is_a_dataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(write_config(tmp_path, {}, {}, {"iterations": 5000}))
    settings = settings.model_copy(update={"train_tokenizer": TrainTokenizerSettings(vocab_size=257)})
    check_model(settings, "tiny")
    assert capsys.readouterr().err == ""
    write_corpus(settings.dataset_prefix, byte_documents(60))
    for _ in range(2):  # Snakemake asks again
        check_model(settings, "tiny")
    told = capsys.readouterr().err
    assert told.startswith("note: models.tiny: the text is read ") and told.count("\n") == 1
    assert "set models.tiny.train.iterations to " in told
