import http.client
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.helpers import wait_for
from tests.slurm.lab.processes import alive
from workflow.demo.serve import Page, main, serve, write_site


@pytest.fixture
def site(tmp_path: Path) -> Path:
    pages = [
        Page("https://one.example/page?x=1", b"one", headers={"Content-Type": "text/plain"}),
        Page("http://two.example/page", b"two", 301, {"Location": "/elsewhere"}),
        Page("http://two.example/ü", b"three", delay=0.2),
    ]
    write_site(tmp_path / "site", pages, [page.url for page in pages])
    return tmp_path / "site"


def get(address: str, host: str, path: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(address)
    try:
        connection.request("GET", path, headers={"Host": host})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def test_pages_are_found_by_host_and_path_and_sent_as_recorded(site: Path) -> None:
    requested: list[str] = []
    with serve(site, requested) as address:
        status, headers, body = get(address, "one.example", "/page?x=1")
        assert (status, headers["Content-Type"], body) == (200, "text/plain", b"one")
        status, headers, body = get(address, "TWO.example", "/page")
        assert (status, headers["Location"], body) == (301, "/elsewhere", b"two")
        assert get(address, "one.example", "/page")[0] == 404
        started = time.monotonic()
        assert get(address, "two.example", "/%C3%BC")[2] == b"three"
        assert time.monotonic() - started > 0.19
    assert requested[:3] == ["one.example/page?x=1", "two.example/page", "one.example/page"]


def test_a_command_runs_with_the_address_and_its_code_is_passed_on(
    site: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workflow.demo.serve.die_with_parent", lambda: None)  # this process goes on
    assert main(["--site", str(site), "--", "sh", "-c", "echo $0; exit 3", "*=ADDRESS"]) == 3
    assert capfd.readouterr().out.startswith("*=127.0.0.1:")
    assert main(["--site", str(site), "--", "sh", "-c", "kill -9 $$"]) == 137


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's parent-death signal")
def test_nothing_outlives_a_killed_server(site: Path) -> None:
    command = [sys.executable, "-m", "workflow.demo.serve", "--site", site, "--", "sh", "-c", "echo $$; exec sleep 120"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        sleeping = psutil.Process(int(server.stdout.readline()))
        server.send_signal(signal.SIGKILL)
    wait_for(lambda: not alive(sleeping))
