"""run.json, the provenance of a result: command, host, time, versions, settings and inputs.

    write_card(run / "run.json", settings=run / "settings/0123.yaml", inputs=paths)

    {"format": 1, "started": "2026-11-22T20:11:31+00:00", "host": "node1", "folder": "/home/me",
     "command": "python -m snakemake all", "commit": "fe430b8…", "versions": {"torch": "2.13.0", …},
     "settings": {"path": "settings/0123.yaml", "sha256": "…"},
     "inputs": [{"path": "urls.txt", "size": 812, "modified": "2026-…"}]}

A card has a date, so it is not an output of a rule. Imports no torch.
"""

import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

from common.files import sha256, write_json

NAME = "run.json"
COMMIT = ".commit"
"""In a copy of the code: the commit that it was copied from."""
_ROOT = Path(__file__).resolve().parents[1]
_LIBRARIES = (
    *("urls-to-gpt2", "torch", "numpy", "snakemake", "submitit", "pydantic"),
    *("aiohttp", "turbohtml", "trafilatura", "newspaper3k", "resiliparse", "ftfy", "pycld2", "langdetect"),
    *("tldextract", "datasketch", "gigatoken", "tiktoken", "tokenizers", "safetensors", "transformers", "lm_eval"),
)
_MOST_INPUTS = 1000  # listed


def write_card(path: Path, *, settings: Path | None = None, inputs: Iterable[Path] = (), **more: Any) -> None:
    """Write a card. `settings`: the file with the resolved settings; `more`: further keys."""
    card = {
        "format": 1,
        "started": _date(datetime.now(UTC).timestamp()),
        "host": socket.gethostname(),
        "folder": os.getcwd(),
        "command": shlex.join(sys.orig_argv),
        "commit": commit(),
        "versions": versions(),
        "inputs": [_input(path) for path in islice(dict.fromkeys(inputs), _MOST_INPUTS)],
        **more,
    }
    if settings is not None:
        named = settings.relative_to(path.parent) if settings.is_relative_to(path.parent) else settings
        card["settings"] = {"path": str(named), "sha256": sha256(settings)}
    write_json(path, card)


def versions() -> dict[str, str]:
    """The version of Python and of each installed library that results depend on."""
    numbers = {"python": platform.python_version()}
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            numbers[name] = metadata.version(name)
    return numbers


def commit(root: Path = _ROOT) -> str | None:
    """The git commit of the code, with -dirty if tracked files were edited; None if unknown."""
    if (root / COMMIT).is_file():
        return (root / COMMIT).read_text(encoding="utf-8").strip() or None
    if not (root / ".git").exists():  # a folder above may be another project's
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _input(path: Path) -> dict[str, Any]:
    """Path, size and date of an input; the path alone if it does not exist yet."""
    if not path.exists():
        return {"path": str(path)}
    status = path.stat()
    return {"path": str(path), "size": status.st_size, "modified": _date(status.st_mtime)}


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
