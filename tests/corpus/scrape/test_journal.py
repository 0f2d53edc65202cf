from pathlib import Path
from typing import Any

import pytest

from common.errors import InputError
from common.files import read_lines
from corpus.scrape.journal import Journal

URLS = [f"http://one.example/{n}" for n in range(5)]
SETTINGS = {"extractors": ["trafilatura"], "max_bytes": 100, "obey_robots": True}
PAGE: dict[str, Any] = {"record": {"text": "three ü", "extractor": "trafilatura"}, "bytes": 7}


def opened(folder: Path, settings: dict[str, Any] = SETTINGS) -> Journal:
    return Journal(folder / "x", settings)


def fill(folder: Path) -> None:
    with opened(folder) as journal:
        journal.append(URLS[3], **PAGE)
        journal.append(URLS[1] + "#part", reason="http_404")


def known(journal: Journal) -> dict[int, str]:
    return {URLS.index(url): entry.get("reason", "ok") for url, entry in journal.known.items()}


@pytest.mark.parametrize("finish", [False, True])
def test_a_journal_keeps_the_outcome_of_each_url_before_and_after_the_shard_is_finished(
    finish: bool, tmp_path: Path
) -> None:
    with opened(tmp_path) as journal:
        journal.accept_settings()
    assert list(tmp_path.iterdir()) == []  # without an outcome there is no file
    fill(tmp_path)
    if finish:
        with opened(tmp_path) as journal:
            journal.finish()
        assert [path.name for path in tmp_path.iterdir()] == ["x.journal.zst"]
    with opened(tmp_path) as journal:
        assert known(journal) == {3: "ok", 1: "http_404"}
        assert journal.known[URLS[3]]["record"] == PAGE["record"]
        journal.append(URLS[0], reason="dns", host_failed=True)
        if finish:
            journal.finish()
        with pytest.raises(InputError):  # two runs do not share a journal
            opened(tmp_path)
    with opened(tmp_path) as journal:
        assert known(journal) == {3: "ok", 1: "http_404", 0: "dns"} and journal.known[URLS[0]]["host_failed"]


def test_a_kill_at_any_byte_costs_only_the_line_that_it_cuts(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    fill(tmp_path)
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        lines = whole[:cut].count(b"\n")
        with opened(tmp_path) as journal:
            assert known(journal) == dict([(3, "ok"), (1, "http_404")][:lines]), cut
            if lines == 0:
                journal.append(URLS[3], **PAGE)
            if lines <= 1:
                journal.append(URLS[1], reason="http_404")
        assert path.read_bytes() == whole


def test_a_kill_between_the_two_steps_of_finish_changes_nothing(tmp_path: Path) -> None:
    fill(tmp_path)
    log = (tmp_path / "x.journal").read_bytes()
    with opened(tmp_path) as journal:
        journal.finish()
    finished = (tmp_path / "x.journal.zst").read_bytes()
    (tmp_path / "x.journal").write_bytes(log)  # not yet removed
    with opened(tmp_path) as journal:
        assert known(journal) == {3: "ok", 1: "http_404"}
        journal.finish()
    assert (tmp_path / "x.journal.zst").read_bytes() == finished and not (tmp_path / "x.journal").exists()


def test_a_damaged_line_costs_only_itself_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    fill(tmp_path)
    path, finished = tmp_path / "x.journal", tmp_path / "x.journal.zst"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second.replace(b'"reason"', b"\0\0\0\0\0\0\0\0"))
    with opened(tmp_path) as journal:
        assert known(journal) == {3: "ok"}
        journal.finish()
    content = bytearray(finished.read_bytes())
    content[len(content) // 2] ^= 1
    finished.write_bytes(content)
    with pytest.raises(InputError, match=r"x\.journal\.zst"):
        opened(tmp_path)
    finished.unlink()
    path.write_bytes(b"another file\n")
    with pytest.raises(InputError, match=r"x\.journal: "):
        opened(tmp_path)


def test_the_last_line_of_a_url_counts_and_outcomes_keep_their_settings(tmp_path: Path) -> None:
    fill(tmp_path)
    larger = {**SETTINGS, "max_bytes": 200}
    for _ in range(2):  # the second time from OUTPUT.journal.zst
        with opened(tmp_path, larger) as journal:
            journal.append(URLS[1], reason="http_410")
        with opened(tmp_path, {**SETTINGS, "max_bytes": 300}) as journal:
            assert known(journal) == {3: "ok", 1: "http_410"}
            assert [journal.known[URLS[n]]["settings"]["max_bytes"] for n in (1, 3)] == [200, 100]
            journal.finish()
    assert sum(b'"url"' in line for line in read_lines(tmp_path / "x.journal.zst")) == 2
