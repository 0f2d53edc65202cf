"""The 181 real article pages of the shared data as a recorded site, each under its own URL."""

import gzip
from pathlib import Path

from common.files import read_json
from demo.site import Page, write_site


def write_real_site(shared: Path, folder: Path, every: int = 1) -> int:
    """Write each `every`-th page of `shared/articles` as a site into `folder`; how many there are."""
    articles = shared / "articles"
    truth = sorted(read_json(articles / "ground-truth.json").items())[::every]
    pages = [
        # no charset: the recording lost the headers, so the page itself has to say
        Page(entry["url"], gzip.decompress((articles / "html" / f"{key}.html.gz").read_bytes()), headers=_HEADERS)
        for key, entry in truth
    ]
    write_site(folder, pages, [page.url for page in pages])
    return len(pages)


_HEADERS = {"Content-Type": "text/html"}
