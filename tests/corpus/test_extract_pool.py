import asyncio
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from common.errors import ToolkitError
from common.settings import ScrapeSettings
from corpus import extract_pool
from corpus.extract_pool import ExtractPool
from corpus.network import PageError
from tests.conftest import ROOT

# A library that does to a page what the page says, put in the place of the real one.
STUB = """
import os, re, signal, socket
from types import SimpleNamespace

def bare_extraction(html, **options):
    if "HANG" in html:
        re.match(r"(a+)+$", "a" * 64 + "b")  # C code that no Python signal handler can interrupt
    if "CRASH" in html:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "NETWORK" in html:
        socket.create_connection(("127.0.0.1", 9))
    print("chatter on standard output")
    return SimpleNamespace(text=f"{os.getpid()} {html}", title="", date=None)
"""
SETTINGS = ScrapeSettings(extractors=["trafilatura"], extract_timeout=1.0)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "trafilatura"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "core.py").write_text(STUB)
    monkeypatch.syspath_prepend(tmp_path)


def outcomes(pages: list[str], workers: int, settings: ScrapeSettings = SETTINGS) -> list[str]:
    """The text, or the reason, of each page; all are handed in at once."""

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
    assert [texts[n].split()[1] for n in (0, 2, 4, 6)] == ["one", "two", "three", "four"]


@pytest.mark.usefixtures("stub")
def test_workers_are_replaced_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract_pool, "PAGES_PER_WORKER", 2)
    processes = [text.split()[0] for text in outcomes(["page"] * 5, workers=1)]
    assert processes[0] == processes[1] != processes[2] == processes[3] != processes[4]


@pytest.mark.usefixtures("stub")
def test_a_hung_worker_dies_even_after_its_parent_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio\n"
        "from common.settings import ScrapeSettings\n"
        "from corpus.extract_pool import ExtractPool\n"
        "async def main():\n"
        "    async with ExtractPool(ScrapeSettings(extractors=['trafilatura'], extract_timeout=2), 1) as pool:\n"
        "        await pool.extract(b'ready', 'text/html', '')\n"
        "        print('hanging', flush=True)\n"
        "        await pool.extract(b'HANG', 'text/html', '')\n"
        "asyncio.run(main())\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"hanging\n"
        (worker,) = psutil.Process(parent.pid).children()
        parent.kill()
    assert worker.is_running()
    _, alive = psutil.wait_procs([worker], timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_library_that_does_not_import_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trafilatura.py").write_text("raise ImportError('broken')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ToolkitError, match="did not start"):
        outcomes(["page"], workers=1)
