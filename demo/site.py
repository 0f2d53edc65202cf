"""Reads and writes a recorded site: a folder of responses that `demo.serve` serves.

    site.json    {"format": 1, "pages": [{"url", "status", "headers", "body", "delay"}, ...]}
    urls.txt     the URLs to scrape, one per line
    pages/NNNN   the bodies of the responses

A page is identified by host and path; the scheme is ignored. `delay` is the time before the first byte, in seconds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import InputError
from common.files import naming, read_json, write_json, write_text

_FORMAT = 1
HTML = "text/html; charset=utf-8"


@dataclass(frozen=True)
class Page:
    """One recorded response."""

    url: str
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": HTML})
    delay: float = 0.0


def write_site(folder: Path, pages: Iterable[Page], urls: Sequence[str]) -> None:
    """Write a site; `site.json` is written last and marks it as complete."""
    (folder / "pages").mkdir(parents=True, exist_ok=True)
    entries = []
    for number, page in enumerate(pages):
        body = f"pages/{number:04d}"
        with naming(folder / body):
            (folder / body).write_bytes(page.body)
        entry = {"url": page.url, "status": page.status, "headers": page.headers, "body": body, "delay": page.delay}
        entries.append(entry)
    write_text(folder / "urls.txt", "".join(f"{url}\n" for url in urls))
    write_json(folder / "site.json", {"format": _FORMAT, "pages": entries})


def read_site(folder: Path) -> list[Page]:
    """The pages of a site. Raises InputError if the folder is not a complete site."""
    path = folder / "site.json"
    site = read_json(path)
    if not isinstance(site, dict) or site.get("format") != _FORMAT:
        raise InputError(f"{path}: not a recorded site of format {_FORMAT}; make it again")
    try:
        return [
            Page(
                url=entry["url"],
                body=(folder / entry["body"]).read_bytes(),
                status=entry["status"],
                headers=entry["headers"],
                delay=entry["delay"],
            )
            for entry in site["pages"]
        ]
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: a page lacks {error}; make the site again") from None
