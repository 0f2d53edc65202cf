"""What a power cut may leave of a run's files: nothing, a half, zeros."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common import steps
from common.config import write_settings
from common.errors import ToolkitError
from common.files import fingerprint, write_json
from common.settings import BlacklistSettings, DecontaminateSettings, RepeatsSettings, Settings, SourceSettings
from common.stats import kept_before
from corpus import decontaminate, repeats
from corpus.blacklist import blacklist
from corpus.ingest import ingest
from corpus.scrape.journal import Journal
from corpus.text.ngrams import sum_counts
from corpus.text.repeats import Repeats, write_repeats
from corpus.urls.lists import read_urls
from tests.helpers import document, prose, write_shard
from tests.workflow.test_rerun import BASE
from training.model_folder import is_finished
from workflow import redone
from workflow.checks import check_crawl, check_takedown
from workflow.patches import changed_input
from workflow.runs import load_run, place

REPEATS, EVALUATION = RepeatsSettings(units=["lines"]), DecontaminateSettings(files=["set.txt"])
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
}
JOURNAL_SETTINGS = {"extractors": ["trafilatura"], "max_bytes": 9}


def accept(run: Path) -> bytes:
    """Open a crawl of known pages, which agrees to its settings again."""
    shard = run / "pages/0000.jsonl.zst"
    with Journal(shard, JOURNAL_SETTINGS) as journal:
        journal.append("http://site.example/", reason="dns")
        journal.accept_settings()
    return journal.settings_path.read_bytes()


def known(run: Path) -> object:
    """Ingest a file that an earlier run has not read."""
    source = SourceSettings(path=str(write_shard(run / "new.jsonl", [document(1, prose(1))])))
    return ingest([source], [run / "out.jsonl"], [run / "ingest/stats.json"]).documents_out


# By file: what reads it, and the command that the error names; none if a damaged file costs
# nothing.
READERS: dict[str, tuple[Callable[[Path, Settings], Any], str]] = {
    "run.json": (lambda run, _: place(run), ""),
    "config.yaml": (lambda run, settings: redone.describe(settings, []) is None, ""),
    "ingest/stats.json": (lambda run, _: known(run), "snakemake -R ingest"),
    "clean/stats.json": (lambda run, _: [*steps.named("clean").figures(run)], "snakemake -R clean"),
    "clean/0000.stats.json": (lambda run, _: kept_before([run / "clean/0000.jsonl.zst"]) and None, ""),
    "urls/0000.txt": (lambda run, _: read_urls(run / "urls/0000.txt", True), "python -m corpus.blacklist"),
    "urls/0001.txt": (lambda run, _: read_urls(run / "urls/0001.txt", True), "python -m corpus.blacklist"),
    "pages/layout.json": (lambda _, settings: check_crawl(settings), "snakemake writes it again"),
    "pages/0000.jsonl.zst.settings.json": (lambda run, _: accept(run), ""),
    "repeats/0000.units": (
        lambda run, _: write_repeats([run / "repeats/0000.units"], run / "repeats/other", REPEATS),
        "`corpus.repeats count`",
    ),
    "repeats/all.repeats": (
        lambda run, _: Repeats(run / "repeats/all.repeats", "0000").documents,
        "`corpus.repeats sum`",
    ),
    "0000.counts.json": (lambda run, _: sum_counts([run / "0000.counts.json"]), "`corpus.decontaminate count`"),
    "counts.json": (lambda run, _: sum_counts([run / "counts.json"]), "`corpus.decontaminate sum`"),
    "takedown/0001.json": (lambda _, settings: check_takedown(settings), "python -m workflow.provenance.remove"),
    "models/tiny/done.json": (lambda _, settings: is_finished(settings, "tiny"), "delete it: the training"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with these files, as the steps write them."""
    run = tmp_path_factory.mktemp("damage") / "run"
    (run / "models/tiny").mkdir(parents=True)
    shard = write_shard(run / "0000.jsonl", [document(1, f"{prose(1)}\n{prose(1)}")])
    write_settings(Settings.model_validate(BASE | {"run": run}), run / "config.yaml")
    write_json(run / "run.json", place(run))
    write_json(run / "ingest/stats.json", {"inputs": {str(shard): fingerprint(shard)}})
    for name in ("stats", "0000.stats"):
        write_json(run / f"clean/{name}.json", {"documents_out": 9})
    (run / "urls.txt").write_text("http://site.example/a\nhttp://site.example/b\n")
    lists = [run / "urls/0000.txt", run / "urls/0001.txt"]  # one of them has no URL
    blacklist([run / "urls.txt"], lists, BlacklistSettings(), marked=True)
    write_json(run / "pages/layout.json", {"shards": 1})
    accept(run)
    repeats.count(shard, run / "repeats/0000.units", REPEATS)
    write_repeats([run / "repeats/0000.units"], run / "repeats/all.repeats", REPEATS)
    (run / "set.txt").write_text(prose(1))
    evaluation = EVALUATION.model_copy(update={"files": [str(run / "set.txt")]})
    for name in ("0000.counts.json", "counts.json"):
        write_json(run / name, decontaminate.count([shard], evaluation))
    write_json(run / "takedown/0001.json", {"state": "done"})
    write_json(run / "models/tiny/done.json", {"iteration": 4})
    return run


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_made_again_or_named_in_one_line_with_the_command_that_makes_it(
    run: Path, name: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings.model_validate(BASE | {"run": run})
    path, (read, command) = run / name, READERS[name]
    whole = path.read_bytes()
    undisturbed = read(run, settings)
    path.write_bytes(DAMAGE[how](whole))
    try:
        found = read(run, settings)
    except ToolkitError as error:
        assert command and command in str(error) and str(path) in str(error) and "\n" not in str(error), error
    else:
        assert found == undisturbed and (not command or path.read_bytes() == whole)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("how", DAMAGE)
def test_a_step_whose_statistics_are_damaged_runs_again(run: Path, how: str) -> None:
    settings = Settings.model_validate(BASE | {"run": run, "sources": [{"path": str(run / "0000.jsonl")}]})
    path = run / "ingest/stats.json"
    whole = path.read_bytes()
    before = changed_input(settings, "ingest")
    path.write_bytes(DAMAGE[how](whole))
    after = changed_input(settings, "ingest")
    path.write_bytes(whole)
    assert (before, after) == (False, True)


def test_the_settings_of_a_run_that_are_damaged_have_a_copy_and_the_next_start_writes_them(run: Path) -> None:
    path = run / "config.yaml"
    whole, settings = path.read_bytes(), load_run(run)
    for damaged in (b"", bytes(99), b"\xff\xfe"):
        path.write_bytes(damaged)
        with pytest.raises(ToolkitError, match=rf"config\.yaml:.* not .*cp .*settings/\*\.yaml .* {path}"):
            load_run(run)
        write_settings(settings, path)
        assert path.read_bytes() == whole
    path.write_bytes(whole[:-9])  # in the names of keys, which no reader needs
    assert load_run(run) == settings
    path.write_bytes(whole)
