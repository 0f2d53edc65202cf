from pathlib import Path

import pytest

from common.errors import InputError
from corpus.journal import Journal

OWNER = {"urls": "list", "settings": "settings", "archive": False}


def fill(path: Path) -> None:
    with Journal(path, OWNER, 5) as journal:
        journal.append(3, 100, record={"text": "three ü"}, bytes=7)
        journal.append(1, 200, reason="http_404")


def test_a_journal_remembers_what_became_of_each_url(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    fill(path)
    with Journal(path, OWNER, 5) as journal:
        assert [position in journal for position in range(5)] == [False, True, False, True, False]
        assert (journal.finished, journal.archive_end) == (2, 200)
        assert journal.outcome(3)["record"] == {"text": "three ü"} and journal.outcome(1)["reason"] == "http_404"
        journal.append(0, 300, reason="timeout")
        assert journal.outcome(0)["reason"] == "timeout" and journal.outcome(3)["bytes"] == 7
    with Journal(path, OWNER, 5) as journal:
        assert journal.finished == 3


def test_failures_of_a_host_are_told_from_those_of_a_page(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    with Journal(path, OWNER, 5) as journal:
        journal.append(2, 0, reason="dns", host_failed=True)
        journal.append(4, 0, reason="http_404")
        assert journal.host_failed(2) and not journal.host_failed(4)
    with Journal(path, OWNER, 5) as journal:
        assert journal.host_failed(2) and not journal.host_failed(4)


def test_a_line_torn_anywhere_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    fill(path)
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        with Journal(path, OWNER, 5) as journal:
            assert (journal.finished, journal.archive_end) == (1, 100)
            journal.append(1, 200, reason="http_404")
        assert path.read_bytes() == whole


@pytest.mark.parametrize("key", list(OWNER))
def test_the_journal_of_another_run_is_discarded(tmp_path: Path, key: str) -> None:
    path = tmp_path / "x.journal"
    fill(path)
    with Journal(path, {**OWNER, key: "other"}, 5) as journal:
        assert (journal.finished, journal.archive_end) == (0, 0)


def test_a_journal_that_settled_nothing_leaves_no_file(tmp_path: Path) -> None:
    with Journal(tmp_path / "x.journal", OWNER, 5):
        pass
    assert list(tmp_path.iterdir()) == []


def test_two_runs_do_not_share_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    with Journal(path, OWNER, 5) as journal:
        journal.append(0, 0, reason="timeout")
        with pytest.raises(InputError, match="in use by another scrape"):
            Journal(path, OWNER, 5)
    assert path.exists()
