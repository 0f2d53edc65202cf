from pathlib import Path

import pytest

from common.errors import InputError
from demo.site import Page, read_site, write_site


def test_a_site_is_read_as_it_was_written(tmp_path: Path) -> None:
    pages = [
        Page("https://one.example/", b"\x00\xff", 503, {"Retry-After": "1"}, 0.5),
        Page("http://two.example/ü?x=1", b"text"),
    ]
    write_site(tmp_path, pages, ["https://one.example/"])
    assert read_site(tmp_path) == pages
    assert (tmp_path / "urls.txt").read_text() == "https://one.example/\n"


def test_a_folder_that_is_no_site_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"site\.json: no such file"):
        read_site(tmp_path)
    (tmp_path / "site.json").write_text('{"format": 2}')
    with pytest.raises(InputError, match=r"site\.json: not a recorded site of format 1"):
        read_site(tmp_path)
    (tmp_path / "site.json").write_text('{"format": 1, "pages": [{"url": "http://one.example/"}]}')
    with pytest.raises(InputError, match=r"site\.json: a page lacks 'body'"):
        read_site(tmp_path)
