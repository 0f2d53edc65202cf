from pathlib import Path
from typing import Any

import pytest

from common.errors import InputError
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


def test_a_journal_keeps_the_last_outcome_of_each_url_with_its_settings_and_has_one_writer(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.accept_settings()
    assert list(tmp_path.iterdir()) == []  # without an outcome there is no file
    fill(tmp_path)
    with opened(tmp_path) as journal:
        assert known(journal) == {3: "ok", 1: "http_404"}
        assert journal.known[URLS[3]]["record"] == PAGE["record"]
        journal.append(URLS[0], reason="dns", host_failed=True)
        with pytest.raises(InputError):  # two runs do not share a journal
            opened(tmp_path)
    with opened(tmp_path) as journal:
        assert known(journal) == {3: "ok", 1: "http_404", 0: "dns"} and journal.known[URLS[0]]["host_failed"]
    with opened(tmp_path, {**SETTINGS, "max_bytes": 200}) as journal:
        journal.append(URLS[1], reason="http_410")
    with opened(tmp_path, {**SETTINGS, "max_bytes": 300}) as journal:  # the last line of a URL counts, as it was made
        assert known(journal) == {3: "ok", 1: "http_410", 0: "dns"}
        assert [journal.known[URLS[n]]["settings"]["max_bytes"] for n in (1, 3)] == [200, 100]


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


def test_a_damaged_line_costs_only_itself_and_another_file_is_named(tmp_path: Path) -> None:
    fill(tmp_path)
    path = tmp_path / "x.journal"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second.replace(b'"reason"', b"\0\0\0\0\0\0\0\0"))
    with opened(tmp_path) as journal:
        assert known(journal) == {3: "ok"}
    path.write_bytes(b"another file\n")
    with pytest.raises(InputError, match=r"x\.journal: "):
        opened(tmp_path)
