"""A fetch that is killed, and what the next one does."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.corpus.remote.fetching import DUMPS, HOST, arguments, at, below, everything, fetch, fetched
from tests.corpus.remote.servers import Server, Site, serving
from tests.helpers import PATIENCE, assert_one_line_error, called, new_seed, wait_for

FILES = {f"in/{n:02}.gz": random.Random(n).randbytes(3000 * n) for n in range(12)}  # 0 to 33 KB


@contextlib.contextmanager
def started(folder: Path, server: Server, *settings: str) -> Iterator["subprocess.Popen[str]"]:
    """The command that fetches FILES, as a process."""
    given = arguments(folder, f"{DUMPS}/*/*.gz", settings=(*at(server), *settings))
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-m", "corpus.fetch", *given], cwd=ROOT, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finished(folder: Path) -> set[str]:
    """The files that are complete."""
    return {name for name in fetched(folder) if not name.endswith(".tmp")}


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_gives_the_same_bytes_and_asks_for_no_finished_file(
    kills: int, tmp_path: Path
) -> None:
    rng = random.Random(new_seed())
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with serving(Site(below(HOST, FILES))) as server:
        assert fetch(whole, f"{DUMPS}/*/*.gz", settings=at(server)).returncode == 0
        total = server.sent
        done = set[str]()
        for _ in range(kills):
            server.requests.clear()
            server.pause_after(rng.randrange(2 * total // kills))
            with started(cut, server, f"fetch.concurrency={rng.randint(1, 6)}") as process:
                wait_for(lambda process=process: process.poll() is not None or server.paused.is_set())
                time.sleep(rng.uniform(0, 0.02))
                process.kill()
                process.wait()
            server.resume()
            assert not {f"{HOST}/dumps/{name}" for name in done} & set(server.asked())
            done = finished(cut)
        server.requests.clear()
        assert fetch(cut, f"{DUMPS}/*/*.gz", settings=at(server)).returncode == 0
        assert not {f"{HOST}/dumps/{name}" for name in done} & set(server.asked())
    assert fetched(cut) == fetched(whole) == FILES
    assert everything(cut).keys() == everything(whole).keys()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_fetch_that_is_told_to_end_ends_in_a_line_and_goes_on_later(number: signal.Signals, tmp_path: Path) -> None:
    with serving(Site(below(HOST, FILES))) as server:
        server.pause_after(100_000)
        with started(tmp_path, server) as process:
            wait_for(lambda: process.poll() is not None or server.paused.is_set())
            os.kill(process.pid, number)
            output, errors = process.communicate()
        assert process.returncode == 128 + number and "Traceback" not in output + errors
        server.resume()
        done = finished(tmp_path)
        server.requests.clear()
        assert fetch(tmp_path, f"{DUMPS}/*/*.gz", settings=at(server)).returncode == 0
        assert not {f"{HOST}/dumps/{name}" for name in done} & set(server.asked())
    assert done and fetched(tmp_path) == FILES


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_fetch_ends_without_a_traceback_whenever_it_is_told_to(rounds: int, tmp_path: Path) -> None:
    rng = random.Random(new_seed())
    files = {f"in/{n:03}.gz": b"%d" % n for n in range(150)}
    with serving(Site(below(HOST, files))) as server:
        for number in range(rounds):
            server.requests.clear()
            moment = rng.randrange(2, 302)  # of two pages, 150 HEAD and 150 GET
            with started(tmp_path / f"{number}", server) as process:
                wait_for(
                    lambda process=process, moment=moment: process.poll() is not None or len(server.requests) >= moment
                )
                process.send_signal(signal.SIGTERM)
                output, errors = process.communicate(timeout=PATIENCE)
            assert process.returncode == 128 + signal.SIGTERM or len(fetched(tmp_path / f"{number}")) == len(files)
            assert "Traceback" not in output + errors


def test_of_two_fetches_into_a_folder_the_second_is_refused(tmp_path: Path) -> None:
    with serving(Site(below(HOST, FILES))) as server:
        server.pause_after(50_000)
        with started(tmp_path, server):
            wait_for(server.paused.is_set)
            assert_one_line_error(fetch(tmp_path, f"{DUMPS}/*/*.gz", settings=at(server)), str(tmp_path))


def test_files_that_the_disk_cannot_hold_are_refused_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total, usage = sum(map(len, FILES.values())), shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=total - 1))
    with serving(Site(below(HOST, FILES))) as server:
        assert_one_line_error(fetch(tmp_path, f"{DUMPS}/*/*.gz", settings=at(server)), str(tmp_path), "free")
        assert not [name for name in server.asked() if name.endswith(".gz")] and fetched(tmp_path) == {}


@pytest.mark.parametrize("left", ["nothing", "the file", "half of its text", "the file and its text"])
def test_a_file_that_is_not_kept_becomes_its_text_once_whatever_a_kill_left_of_it(left: str, tmp_path: Path) -> None:
    name, data = "a.jsonl", b"".join(b'{"text": "text %d"}\n' % n for n in range(50))
    config = tmp_path / "config.yaml"
    config.write_text(f"run: {tmp_path}/run\nsources: [{{path: '{DUMPS}/*.jsonl', keep: false}}]\n")
    with serving(Site(below(HOST, {name: data, "b.jsonl": data}))) as server:
        assert called("corpus.fetch", "--config", config, *at(server)).returncode == 0
        whole = fetched(tmp_path / "run" / "fetch")
        assert sorted(whole) == ["a.jsonl.documents.jsonl.zst", "b.jsonl.documents.jsonl.zst"]
        (text,) = (tmp_path / "run" / "fetch").rglob("a.*")
        if left != "the file and its text":
            text.unlink()
        if left == "half of its text":
            text.with_name(f"{text.name}.tmp").write_bytes(b"half")
        if left != "nothing":
            text.with_name(name).write_bytes(data)
        server.requests.clear()
        assert called("corpus.fetch", "--config", config, *at(server)).returncode == 0
        assert fetched(tmp_path / "run" / "fetch") == whole
        assert server.asked() == ([f"{HOST}/dumps/{name}"] if left == "nothing" else [])
