"""`corpus.fetch`, run against the stores of `servers`, and what it wrote."""

import json
import subprocess
from pathlib import Path

from tests.corpus.remote.servers import Server
from tests.helpers import called

HOST = "files.example"
DUMPS = f"https://{HOST}/dumps"


def arguments(folder: Path, *urls: str, settings: tuple[str, ...] = (), options: tuple[str, ...] = ()) -> list[str]:
    """The command line that fetches URLs into a folder, without waits between attempts."""
    return ["--input", *urls, "--output-dir", str(folder), *options, "fetch.retry_delay=0.01", *settings]


def fetch(
    folder: Path, *urls: str, settings: tuple[str, ...] = (), options: tuple[str, ...] = ()
) -> "subprocess.CompletedProcess[str]":
    """Fetch URLs into a folder, in this process."""
    return called("corpus.fetch", *arguments(folder, *urls, settings=settings, options=options))


def at(server: Server, *hosts: str) -> tuple[str, ...]:
    """Settings by which these hosts, or every one, are the server."""
    return ("scrape.resolve={" + ", ".join(f'"{host}": "{server.address}"' for host in hosts or ["*"]) + "}",)


def fetched(folder: Path) -> dict[str, bytes]:
    """Every fetched file by its name below the folder of its source."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.parent != folder]
    return {path.relative_to(folder).as_posix().partition("/")[2]: path.read_bytes() for path in paths}


def everything(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, listings included."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def listed(folder: Path) -> list[str]:
    """The names in the listings of a folder."""
    return [file["name"] for path in sorted(folder.glob("*.json")) for file in json.loads(path.read_bytes())["files"]]


def below(host: str, files: dict[str, bytes], folder: str = "dumps") -> dict[str, bytes]:
    """Files of a site by `host/folder/name`."""
    return {f"{host}/{folder}/{name}": data for name, data in files.items()}
