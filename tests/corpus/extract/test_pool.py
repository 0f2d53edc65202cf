import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from common.errors import PageError, ToolkitError
from common.settings import BlacklistSettings, ScrapeSettings
from corpus.extract import pool as extract_pool
from corpus.extract.pool import ExtractPool
from corpus.scrape.__main__ import scrape
from tests.conftest import ROOT
from tests.helpers import prose
from tests.rude_server import reply, rude_server

# Replaces trafilatura by a library that does what the page says.
STUB = """
import os, re, signal, socket
from types import SimpleNamespace

LOADED_BY = os.getpid()
LEAKED = []

class load_html(str):
    def xpath(self, path):
        return []

def examine_meta(html):
    return SimpleNamespace(title="Title")

def find_date(html, **options):
    return None

extract_title = find_date

def bare_extraction(html, **options):
    if "HANG" in html:
        re.match(r"(a+)+$", "a" * 64 + "b")  # C code that no Python signal handler can interrupt
    if "CRASH" in html:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "NETWORK" in html:
        socket.create_connection(("127.0.0.1", 9))
    if "LEAK" in html:
        LEAKED.append(bytes(int(re.search("LEAK ([0-9]+)", html)[1]) << 20))
    if "EAT" in html:
        try:
            eaten = [bytes(1 << 20) for _ in range(int(re.search("EAT ([0-9]+)", html)[1]))]
        except MemoryError:
            if "QUIETLY" not in html:
                os.kill(os.getpid(), signal.SIGSEGV) if "BADLY" in html else (_ for _ in ()).throw(MemoryError)
            html = html.replace("EAT", "SPAT")  # half a page
    print("chatter on standard output")
    return SimpleNamespace(text=f"{os.getpid()} {LOADED_BY} {html}")
"""
SETTINGS = ScrapeSettings(extractors=["trafilatura"], extract_timeout=1.0)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "trafilatura"
    package.mkdir()
    for module in ("__init__", "core", "metadata"):
        (package / f"{module}.py").write_text(STUB)
    monkeypatch.syspath_prepend(tmp_path)


def outcomes(pages: list[str], workers: int, settings: ScrapeSettings = SETTINGS) -> list[str]:
    """Extract all pages at once; returns the text or the reason of each."""

    async def one(pool: ExtractPool, page: str) -> str:
        try:
            return (await pool.extract(page.encode(), "text/html", "http://one.example/")).text
        except PageError as error:
            return error.reason

    async def every() -> list[str]:
        async with ExtractPool(settings, workers) as pool:
            return await asyncio.gather(*(one(pool, page) for page in pages))

    return asyncio.run(every())


@pytest.mark.usefixtures("stub")
def test_a_hang_or_a_crash_costs_one_page_and_nothing_else() -> None:
    started = time.monotonic()
    texts = outcomes(["one", "HANG", "two", "CRASH", "three", "NETWORK", "four"], workers=2)
    assert time.monotonic() - started < 60
    assert [texts[n] for n in (1, 3, 5)] == ["extract_timeout", "extract_crash", "extract_error"]
    assert [texts[n].split()[2] for n in (0, 2, 4, 6)] == ["one", "two", "three", "four"]


@pytest.mark.usefixtures("stub")
def test_pages_after_a_fatal_one_are_extracted_by_the_next_process() -> None:
    texts = outcomes(["one", "CRASH", "two", "CRASH", "three"], workers=1)
    assert [texts[n] for n in (1, 3)] == ["extract_crash", "extract_crash"]
    assert [texts[n].split()[2] for n in (0, 2, 4)] == ["one", "two", "three"]


@pytest.mark.usefixtures("stub")
def test_large_pages_and_large_replies_do_not_deadlock() -> None:
    texts = outcomes([letter * 3_000_000 for letter in "abc"], workers=1)
    assert [text.split()[2][:2] + str(len(text) > 3_000_000) for text in texts] == ["aaTrue", "bbTrue", "ccTrue"]


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize(
    "page", ["EAT 130", "EAT 180", "EAT 500", "EAT 130 QUIETLY", "EAT 500 QUIETLY", "EAT 130 BADLY"]
)
def test_memory_is_bounded_whatever_earlier_pages_leaked(page: str) -> None:
    settings = SETTINGS.model_copy(update={"extract_memory_mb": 150, "extract_timeout": 20.0})
    expected = "extract_memory" if int(page.split()[1]) > 150 else page
    pages = [page, "one", "LEAK 40", page, "LEAK 40", "LEAK 40", "two", page, "three"]
    texts = [text.split(maxsplit=2)[-1] for text in outcomes(pages, workers=1, settings=settings)]
    assert texts == [expected if text == page else text for text in pages]


@pytest.mark.usefixtures("stub")
def test_a_page_that_kills_a_used_process_is_retried_once_in_a_fresh_one() -> None:
    settings = SETTINGS.model_copy(update={"extract_memory_mb": 150})
    assert outcomes(["one", "CRASH", "two"], 1, settings)[1] == "extract_crash"
    assert outcomes(["one", "EAT 500 BADLY", "two"], 1, settings)[1] == "extract_crash"


def test_pages_that_exhaust_memory_are_dropped_with_a_reason_and_the_others_kept() -> None:
    article = f"<html><body><article><h1>A title</h1><p>{prose(1)}</p><p>{prose(2)}</p></article></body></html>"
    bombs = {
        "<p>x" * 2_000_000: "too_many_tags",
        "<p a=b c=d e=f g=h i=j>x" * 60_000: "extract_memory",
        "<b>" * 240_000: "extract_empty",
        "x" * 9_000_000: "extract_empty",
        f"<p a='{'x' * 9_000_000}'>": "extract_empty",
    }
    settings = ScrapeSettings(extract_memory_mb=100)
    texts = outcomes([text for bomb in bombs for text in (article, bomb)] + [article], workers=1, settings=settings)
    assert texts[1::2] == list(bombs.values())
    assert len(set(texts[::2])) == 1 and prose(1) in texts[0]


@pytest.mark.usefixtures("stub")
def test_a_crash_is_a_reason_in_the_rejects_of_a_scrape(tmp_path: Path) -> None:
    (tmp_path / "urls.txt").write_text("".join(f"http://one.example/{n}\n" for n in range(3)))
    pages = {f"one.example/{n}": reply(text) for n, text in enumerate((b"one", b"CRASH", b"three"))}
    rejects = tmp_path / "rejects.jsonl"
    with rude_server(pages) as server:
        settings = SETTINGS.model_copy(update={"resolve": {"*": server.address}, "host_delay": 0, "obey_robots": False})
        stats = scrape(
            tmp_path / "urls.txt", tmp_path / "pages.jsonl", settings, BlacklistSettings(), rejects=rejects, workers=1
        )
    assert stats.documents_out == 2
    assert json.loads(rejects.read_text()) == {
        "dropped_by": "scrape",
        "url": "http://one.example/1",
        "reason": "extract_crash",
    }


@pytest.mark.usefixtures("stub")
def test_processes_are_replaced_without_loading_the_libraries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extract_pool, "PAGES_PER_CHILD", 2)
    processes, loaders = zip(*(text.split()[:2] for text in outcomes(["page"] * 5, workers=1)), strict=True)
    assert processes[0] == processes[1] != processes[2] == processes[3] != processes[4]
    assert len(set(loaders)) == 1


@pytest.mark.usefixtures("stub")
def test_a_hung_worker_dies_at_once_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio\n"
        "from common.settings import ScrapeSettings\n"
        "from corpus.extract.pool import ExtractPool\n"
        "async def main():\n"
        "    async with ExtractPool(ScrapeSettings(extractors=['trafilatura'], extract_timeout=600), 1) as pool:\n"
        "        await pool.extract(b'ready', 'text/html', '')\n"
        "        print('hanging', flush=True)\n"
        "        await pool.extract(b'HANG', 'text/html', '')\n"
        "asyncio.run(main())\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"hanging\n"
        workers = psutil.Process(parent.pid).children(recursive=True)
        time.sleep(0.5)  # until the worker has the page that hangs
        parent.kill()
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_library_that_cannot_be_imported_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trafilatura.py").write_text("raise ImportError('broken')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ToolkitError, match="did not start"):
        outcomes(["page"] * 8, workers=2)  # the first to fail cancels the others, some of them while they start
