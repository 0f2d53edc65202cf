"""The form of a recorded site: a folder that `demo.serve` answers from, under the hosts' own names.

    site.json    {"format": 1, "pages": [{"url", "status", "headers", "body", "delay"}, ...]}
    urls.txt     the list to scrape, one URL a line
    pages/NNNN   the bodies, as sent

A page is found by its host and path, whatever the scheme. `delay` is in seconds, before the first byte.
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
    """Write a site; `site.json`, the last file, makes it complete."""
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
    """The pages of a site. Raises InputError when the folder holds none."""
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
