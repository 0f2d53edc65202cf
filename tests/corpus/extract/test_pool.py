import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest

from common.errors import ToolkitError
from common.settings import ScrapeSettings
from common.workers import Workers
from corpus.extract.pool import extract_in_child
from corpus.scrape.response import FetchedPage
from tests.conftest import ROOT
from tests.helpers import wait_for
from tests.slurm.lab.processes import alive

# Replaces trafilatura by a library that does what the page says.
STUB = """
import os, re, signal, socket, time
from types import SimpleNamespace

from lxml.html import document_fromstring as load_html

LEAKED = []

BODY_XPATH = []

def examine_meta(html, **options):
    return SimpleNamespace(title=None)

find_date = extract_title = lambda html, **options: None

def bare_extraction(tree, **options):
    html = tree.text_content()
    if "HANG" in html:
        open(__file__ + ".hangs", "w").close()
        re.match(r"(a+)+$", "a" * 64 + "b")  # C code that no Python signal handler can interrupt
    if "WAIT" in html:
        time.sleep(float(re.search("WAIT ([0-9.]+)", html)[1]))
    if "KILLED" in html:
        os.kill(os.getpid(), signal.SIGKILL)
    if "CRASH" in html and (LEAKED or "LATER" not in html):
        os.kill(os.getpid(), signal.SIGSEGV)
    if "NETWORK" in html:
        socket.create_connection(("127.0.0.1", 9))
    if "LEAK" in html:
        LEAKED.append(bytes(int(re.search("LEAK ([0-9]+)", html)[1]) << 20))
    if "EAT" in html:
        try:
            eaten = [bytes(1 << 20) for _ in range(int(re.search("EAT ([0-9]+)", html)[1]))]
        except MemoryError:
            if "BADLY" in html:
                os.kill(os.getpid(), signal.SIGSEGV)
            if "QUIETLY" not in html:
                raise
            html = html.replace("EAT", "SPAT")  # half a page
    print("chatter on standard output")
    return SimpleNamespace(text=html)
"""
SETTINGS = ScrapeSettings(extractors=["trafilatura"], extract_timeout=5.0)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "trafilatura"
    package.mkdir()
    for module in ("__init__", "core", "metadata", "xpaths"):
        (package / f"{module}.py").write_text(STUB)
    monkeypatch.syspath_prepend(tmp_path)
    for module in [name for name in sys.modules if name.partition(".")[0] == "trafilatura"]:
        monkeypatch.delitem(sys.modules, module)  # workers are forked from this process
    return package


def outcomes(pages: list[str], workers: int = 1, settings: ScrapeSettings = SETTINGS) -> list[str]:
    """Extract all pages at once; returns the text or the reason of each.

    In a new process, as other tests have freed memory in this one.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        return processes.submit(extracted, pages, workers, settings).result()


def extracted(pages: list[str], workers: int, settings: ScrapeSettings) -> list[str]:
    """`outcomes`, in this process."""
    extract = partial(extract_in_child, settings)
    with Workers(workers) as pool:
        pool.start()
        replies = [future.result() for future in [pool.submit(extract, page_of(page)) for page in pages]]
    return [reply if isinstance(reply, str) else reply.text for reply in replies]


def page_of(text: str) -> FetchedPage:
    return FetchedPage("http://one.example/", 200, "OK", (), "text/html", b"", text.encode())


@pytest.mark.usefixtures("stub")
def test_a_hang_or_a_crash_costs_one_page_and_nothing_else() -> None:
    reasons = {"HANG": "extract_timeout", "CRASH": "extract_crash", "NETWORK": "extract_error"}
    pages = ["one", "HANG", "two", "CRASH", "a" * 3_000_000, "CRASH", "b" * 3_000_000, "NETWORK", "three"]
    pages += ["LEAK 1", "CRASH LATER"]  # which only a used child does
    for workers in (1, 2):
        assert outcomes(pages, workers) == [reasons.get(page, page) for page in pages]


@pytest.mark.usefixtures("stub")
def test_a_page_that_waits_for_the_machine_is_kept() -> None:
    """The limit counts CPU time. A page that gets none ends the command; it is not dropped."""
    settings = SETTINGS.model_copy(update={"extract_timeout": 0.5})
    assert outcomes(["WAIT 1", "two"], settings=settings) == ["WAIT 1", "two"]
    impatient = SETTINGS.model_copy(update={"extract_timeout": 0.05})
    with pytest.raises(ToolkitError, match=r"http://one.example/: 3 s were not enough to extract it; .*--workers"):
        outcomes(["WAIT 60"], settings=impatient)


@pytest.mark.usefixtures("stub")
def test_a_page_whose_process_is_killed_ends_the_command() -> None:
    """The kernel kills whatever has most memory when it runs out: the page is not to blame."""
    with pytest.raises(ToolkitError, match=r"http://one.example/: its extraction was killed .*more memory"):
        outcomes(["one", "KILLED", "two"])


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("page", ["EAT 130", "EAT 500", "EAT 180 QUIETLY", "EAT 130 BADLY"])
def test_memory_is_bounded_whatever_earlier_pages_leaked(page: str) -> None:
    settings = SETTINGS.model_copy(update={"extract_memory_mb": 150, "extract_timeout": 60.0})
    expected = "extract_memory" if int(page.split()[1]) > 150 else page
    pages = [page, "one", "LEAK 40", page, "LEAK 40", "LEAK 40", "two", page, "three"]
    assert outcomes(pages, settings=settings) == [expected if text == page else text for text in pages]


def test_a_hung_worker_dies_at_once_when_its_parent_is_killed(stub: Path) -> None:
    script = stub / "parent.py"
    script.write_text(
        "from tests.corpus.extract.test_pool import SETTINGS, extracted\n"
        "extracted(['HANG'], 1, SETTINGS.model_copy(update={'extract_timeout': 600}))\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{stub.parent}:{ROOT}"}
    with subprocess.Popen([sys.executable, script], env=environment, cwd=ROOT) as parent:
        wait_for(lambda: list(stub.glob("*.hangs")) or parent.poll() is not None)
        workers = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
    assert len(workers) == 2
    wait_for(lambda: not any(map(alive, workers)))
