from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import huggingface_hub.constants
import pytest

from tests.corpus.remote.fetching import HOST, at, below
from tests.corpus.remote.servers import S3, Hub, Server, Site, running, s3_server, serving

NUMBERS = {f"{n}.jsonl.gz": bytes([n]) * (1000 + n) for n in range(5)}
"""Five files that differ."""


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide accounts and tokens of the user from every test."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(home / "token"))


@dataclass
class Web:
    """A site with files in `dumps`, its server, and the settings that lead there."""

    site: Site
    server: Server
    settings: tuple[str, ...]


@pytest.fixture
def web() -> Iterator[Web]:
    """The site files.example with five files."""
    site = Site(below(HOST, NUMBERS))
    with serving(site) as server:
        yield Web(site, server, at(server))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The dataset `me/texts` with files in LFS and in git, on a Hub that huggingface_hub finds."""
    files = {f"data/part-{n}.parquet": b"PAR1" * (500 + n) for n in range(3)}
    hub = Hub("me/texts")
    hub.push({"README.md": b"# Texts\n", "data/notes.jsonl": b'{"text": "a note"}\n' * 30, **files})
    with running(hub):
        url = f"http://{hub.server.address}"
        monkeypatch.setenv("HF_ENDPOINT", url)
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)  # read from the environment at import
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


@pytest.fixture(scope="module")
def moto() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(moto: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """An S3 that boto3 finds. A module's tests share it, each with a bucket of its own."""
    for name, value in moto.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # keeps the first account that it found
    moto.requests.clear()
    return moto
