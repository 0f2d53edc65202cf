"""The 181 real article pages of the shared data as a recorded site, each under its own URL."""

import gzip
from pathlib import Path

from common.files import read_json
from workflow.demo.serve import Page, write_site


def write_real_site(shared: Path, folder: Path) -> int:
    """Write the pages of `shared/articles` as a site into `folder`; how many there are."""
    articles = shared / "articles"
    headers = {"Content-Type": "text/html"}  # no charset: the recording lost the headers, so the page has to say
    pages = [
        Page(entry["url"], gzip.decompress((articles / "html" / f"{key}.html.gz").read_bytes()), headers=headers)
        for key, entry in sorted(read_json(articles / "ground-truth.json").items())
    ]
    write_site(folder, pages, [page.url for page in pages])
    return len(pages)
