from pathlib import Path
from typing import Any

import pytest

from common.errors import InputError
from common.files import read_lines
from corpus.scrape.journal import Journal

URLS = [f"http://one.example/{n}" for n in range(5)]
SETTINGS = {"extractors": ["trafilatura"], "max_bytes": 100, "obey_robots": True}
PAGE: dict[str, Any] = {"record": {"text": "three ü", "extractor": "trafilatura"}, "bytes": 7}


def opened(folder: Path, urls: list[str] = URLS, settings: dict[str, Any] = SETTINGS) -> Journal:
    return Journal(folder / "x", urls, urls, settings)


def fill(folder: Path) -> None:
    with opened(folder) as journal:
        journal.append(3, URLS[3], at=50, archive=100, **PAGE)
        journal.append(1, URLS[1], reason="http_404")


def known(journal: Journal, count: int = 5) -> list[str]:
    return [journal.reason(position) for position in range(count)]


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
        assert known(journal) == ["", "http_404", "", "ok", ""]
        assert (journal.finished, journal.archive_end) == (2, 100)
        assert (journal.archive_offset(3), journal.archive_offset(1)) == (50, None)
        assert journal.outcome(3)["record"] == PAGE["record"] and journal.outcome(1)["reason"] == "http_404"
        journal.append(0, URLS[0], reason="dns", host_failed=True)
        assert journal.outcome(0)["reason"] == "dns" and journal.outcome(3)["bytes"] == 7
        if finish:
            journal.finish()
        with pytest.raises(InputError):  # two runs do not share a journal
            opened(tmp_path)
    with opened(tmp_path) as journal:
        assert journal.finished == 3 and journal.host_failed(0) and not journal.host_failed(1)
    with opened(tmp_path, ["http://new.example/", URLS[3], URLS[2]]) as journal:  # another list
        assert known(journal, 3) == ["", "ok", ""] and journal.finished == 1
        journal.finish()
    with opened(tmp_path) as journal:
        assert known(journal) == ["dns", "http_404", "", "ok", ""]


def test_a_kill_at_any_byte_costs_only_the_line_that_it_cuts(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    fill(tmp_path)
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        lines = whole[:cut].count(b"\n")
        with opened(tmp_path) as journal:
            assert known(journal) == ["", "http_404" if lines > 2 else "", "", "ok" if lines > 1 else "", ""], cut
            assert (journal.finished, journal.archive_end) == (max(lines - 1, 0), 100 if lines > 1 else 0)
            if lines <= 1:
                journal.append(3, URLS[3], at=50, archive=100, **PAGE)
            if lines <= 2:
                journal.append(1, URLS[1], reason="http_404")
        assert path.read_bytes() == whole


def test_a_kill_between_the_two_steps_of_finish_changes_nothing(tmp_path: Path) -> None:
    fill(tmp_path)
    log = (tmp_path / "x.journal").read_bytes()
    with opened(tmp_path) as journal:
        journal.finish()
    base = (tmp_path / "x.journal.zst").read_bytes()
    (tmp_path / "x.journal").write_bytes(log)  # not yet removed
    with opened(tmp_path) as journal:
        assert known(journal) == ["", "http_404", "", "ok", ""] and journal.archive_offset(3) == 50
        journal.finish()
    assert (tmp_path / "x.journal.zst").read_bytes() == base and not (tmp_path / "x.journal").exists()


def test_a_damaged_line_costs_only_itself_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    fill(tmp_path)
    path, base = tmp_path / "x.journal", tmp_path / "x.journal.zst"
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second.replace(b'"bytes"', b"\0\0\0\0\0\0\0") + third)
    with opened(tmp_path) as journal:
        assert known(journal) == ["", "http_404", "", "", ""]
        journal.finish()
    content = bytearray(base.read_bytes())
    content[len(content) // 2] ^= 1
    base.write_bytes(content)
    with pytest.raises(InputError, match=r"x\.journal\.zst: damaged at byte 0"):
        opened(tmp_path)


def test_the_last_line_of_a_url_counts_and_outcomes_keep_their_settings(tmp_path: Path) -> None:
    fill(tmp_path)
    larger = {**SETTINGS, "max_bytes": 200}
    for _ in range(2):  # the second time from OUTPUT.journal.zst
        with opened(tmp_path, settings=larger) as journal:
            journal.append(1, URLS[1], reason="http_410")
            journal.append(2, URLS[2], reason="robots", settings=SETTINGS)
        with opened(tmp_path, settings={**SETTINGS, "max_bytes": 300}) as journal:
            assert known(journal) == ["", "http_410", "robots", "ok", ""]
            assert [journal.settings_of(position)["max_bytes"] for position in (1, 2, 3)] == [200, 100, 100]
            journal.finish()
    assert sum(b'"url"' in line for line in read_lines(tmp_path / "x.journal.zst")) == 3
