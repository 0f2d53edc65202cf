"""Web servers that fail, lie or change: either the right bytes arrive, or one line says why not."""

import asyncio
import gzip
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.corpus.remote.conftest import Web
from tests.corpus.remote.fetching import DUMPS, HOST, at, below, everything, fetch, fetched
from tests.corpus.remote.servers import (
    Answer,
    Fault,
    Request,
    Respond,
    Site,
    body,
    chunked,
    cut,
    fields,
    longer,
    moved,
    serving,
    status,
    whole,
)
from tests.helpers import assert_one_line_error

BIG = f"{HOST}/dumps/big.gz"
DATA = gzip.compress(b"".join(b"%d" % n for n in range(20_000)), mtime=0)
NO_VALIDATORS = fields(etag=None, last_modified=None)


@pytest.fixture
def big(web: Web) -> Web:
    """A site with one file, of some 40 KB."""
    web.site.files = {BIG: DATA}
    return web


def other_span(request: Request, good: Respond) -> Answer:
    """Bytes from another position than those asked for."""
    return good(request).but(content_range=f"bytes 0-{len(DATA) - 1}/{len(DATA)}")


@pytest.mark.parametrize(
    ("faults", "asked"),
    [
        ([cut(10_000)], 2),
        ([cut(10_000), cut(5_000), cut(1)], 4),
        ([cut(10_000, reset=True)], 2),
        ([cut(0)], 2),
        ([cut(-1)], 2),
        ([cut(10_000), whole], 2),
        ([cut(10_000), other_span], 3),
        ([cut(10_000), status(416, content_range=f"bytes */{len(DATA)}")], 3),
        ([status(503)], 2),
        ([status(429, retry_after="0")] * 2, 3),
        ([status(500), cut(10_000), status(502), status(504)], 5),
        ([chunked], 1),
        ([lambda request, good: chunked(request, lambda request: cut(10_000)(request, good))], 2),
    ],
)
def test_after_a_fault_that_passes_the_bytes_are_right(
    faults: list[Fault], asked: int, tmp_path: Path, big: Web
) -> None:
    big.site.faults[BIG] = list(faults)
    done = fetch(tmp_path, f"{DUMPS}/big.gz", settings=(*big.settings, "fetch.retries=4"))
    assert done.returncode == 0, done
    assert fetched(tmp_path) == {"big.gz": DATA} and big.server.asked() == [BIG] * asked


def test_what_has_arrived_is_not_sent_again(tmp_path: Path, big: Web) -> None:
    big.site.faults[BIG] = [cut(30_000), cut(5_000)]
    assert fetch(tmp_path, f"{DUMPS}/big.gz", settings=big.settings).returncode == 0
    first, second, third = (request.headers for request in big.server.requests if request.method == "GET")
    assert "range" not in first
    start, end = (int(re.fullmatch(r"bytes=(\d+)-", headers["range"])[1]) for headers in (second, third))
    assert 0 < start <= 30_000 and start < end <= start + 5_000
    assert big.server.sent < len(DATA) + 12 * 4096  # what was under way when the connection was lost


@pytest.mark.parametrize("name", ["big.gz", "big.jsonl"])
def test_files_are_kept_as_they_are_stored_when_the_server_packs_them_for_the_way(name: str, tmp_path: Path) -> None:
    """Apache says `Content-Encoding: gzip` of a .gz; others compress text if that is accepted."""
    url, text = f"{HOST}/dumps/{name}", gzip.decompress(DATA)

    def packed(request: Request, good: Respond) -> Answer:
        if name == "big.gz":
            return good(request).but(content_encoding="x-gzip", content_type="application/x-gzip")
        if "gzip" in request.headers.get("accept-encoding", ""):
            return body(DATA)(request, good).but(content_encoding="gzip", etag='W/"packed"')
        return good(request)

    with serving(Site({url: DATA if name == "big.gz" else text}, always={url: packed})) as server:
        done = fetch(tmp_path, f"{DUMPS}/{name}", settings=at(server))
    assert done.returncode == 0, done
    assert fetched(tmp_path) == {name: DATA if name == "big.gz" else text}


def test_a_busy_server_is_asked_again_when_it_said(tmp_path: Path, big: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, sleep = [], asyncio.sleep

    async def skip(delay: float, *given: object) -> None:
        waits.append(delay)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", skip)
    big.site.faults[BIG] = [status(429, retry_after="7"), status(503, retry_after="11")]
    assert fetch(tmp_path, f"{DUMPS}/big.gz", settings=big.settings).returncode == 0
    long = [wait for wait in waits if wait > 1]
    assert len(long) == 2 and 7 <= long[0] < 11 <= long[1] < 20


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (status(404), "404"),
        (status(403), "403"),
        (status(503), "503"),
        (status(429), "429"),
        (cut(0), "connection"),
        (longer(1000), "changed"),
        (moved("/dumps/big.gz"), "redirect"),
        (moved("http://10.0.0.1/big.gz"), "private"),
        (moved("http://127.0.0.1:9/big.gz"), "private"),
        (moved("file:///etc/passwd"), "file"),
        (moved("//[bad/big.gz"), "big.gz"),
    ],
)
def test_a_fault_that_stays_is_one_line_that_names_the_file_and_leaves_no_file(
    fault: Fault, said: str, tmp_path: Path, big: Web
) -> None:
    options, where = (
        ("fetch.retries=1", "fetch.concurrency=1", "scrape.contact=me@here.example", *at(big.server, HOST)),
        (tmp_path, f"{DUMPS}/*.gz"),
    )
    big.site.files[f"{HOST}/dumps/small.gz"] = b"small"
    assert fetch(*where, settings=options, options=("--list",)).returncode == 0
    big.site.always[BIG] = fault
    done = fetch(*where, settings=options)
    assert done.returncode in (2, 75), done
    lines = done.stderr.strip().splitlines()
    assert "big.gz" in lines[-1] and said in lines[-1].lower() and "Traceback" not in done.stderr
    assert fetched(tmp_path).get("small.gz") == b"small" and "big.gz" not in fetched(tmp_path)
    del big.site.always[BIG]
    big.server.requests.clear()
    assert fetch(*where, settings=options).returncode == 0
    assert fetched(tmp_path) == {"big.gz": DATA, "small.gz": b"small"} and big.server.asked() == [BIG]


def etag_changed(site: Site) -> None:
    site.files[BIG] = DATA[:-1] + b"!"


def time_changed(site: Site) -> None:
    etag_changed(site)
    site.always[BIG] = fields(etag=None)
    site.modified[BIG] = "Mon, 30 Nov 2026 00:00:00 GMT"


def size_changed(site: Site) -> None:
    site.files[BIG] = DATA + b"!"
    site.always[BIG] = NO_VALIDATORS


@pytest.mark.parametrize(
    ("always", "change"), [(None, etag_changed), (fields(etag=None), time_changed), (NO_VALIDATORS, size_changed)]
)
@pytest.mark.parametrize("begun", [False, True])
def test_a_file_that_changed_since_it_was_listed_is_refused_until_the_listing_is_renewed(
    always: Fault | None, change: Callable[[Site], None], begun: bool, tmp_path: Path, big: Web
) -> None:
    if always:
        big.site.always[BIG] = always
    where = (tmp_path, f"{DUMPS}/*.gz")
    options = () if begun else ("--list",)
    if begun:  # half of the file is there already
        big.site.faults[BIG] = [lambda request, good: (always or whole)(request, lambda r: cut(20_000)(r, good))]
        assert fetch(*where, settings=(*big.settings, "fetch.retries=0")).returncode != 0
    else:
        assert fetch(*where, settings=big.settings, options=options).returncode == 0
    change(big.site)
    done = fetch(*where, settings=big.settings)
    assert_one_line_error(done, "big.gz", "--renew")
    assert "big.gz" not in fetched(tmp_path)
    assert fetch(*where, settings=big.settings, options=("--renew",)).returncode == 0
    assert fetched(tmp_path) == {"big.gz": big.site.files[BIG]}


def test_a_file_without_size_and_time_is_fetched_whole_each_time_it_is_cut(tmp_path: Path, big: Web) -> None:
    def nameless(request: Request, good: Respond) -> Answer:
        return chunked(request, lambda request: whole(request, lambda request: NO_VALIDATORS(request, good)))

    big.site.always[BIG] = nameless
    big.site.faults[BIG] = [lambda request, good: nameless(request, lambda request: cut(10_000)(request, good))]
    done = fetch(tmp_path, f"{DUMPS}/big.gz", settings=big.settings)
    assert done.returncode == 0, done
    assert fetched(tmp_path) == {"big.gz": DATA}


def test_redirects_to_other_paths_and_hosts_are_followed_without_credentials(
    tmp_path: Path, big: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    big.site.files = {"mirror.example/m/blob-17": DATA}
    big.site.always[BIG] = moved("/dumps/elsewhere.gz", 301)
    big.site.always[f"{HOST}/dumps/elsewhere.gz"] = moved("https://mirror.example/m/blob-17", 307)
    done = fetch(tmp_path, f"{DUMPS}/big.gz", settings=big.settings)
    assert done.returncode == 0, done
    assert fetched(tmp_path) == {"big.gz": DATA}


def test_an_empty_file_and_a_short_one_are_files(tmp_path: Path, big: Web) -> None:
    big.site.files = {f"{HOST}/dumps/{name}": data for name, data in {"empty.gz": b"", "one.gz": b"1"}.items()}
    assert fetch(tmp_path, f"{DUMPS}/*.gz", settings=big.settings).returncode == 0
    assert fetched(tmp_path) == {"empty.gz": b"", "one.gz": b"1"}
    before = everything(tmp_path)
    assert fetch(tmp_path, f"{DUMPS}/*.gz", settings=big.settings).returncode == 0 and everything(tmp_path) == before


def test_a_server_that_says_more_bytes_than_it_sends_is_given_up(tmp_path: Path, big: Web) -> None:
    big.site.always[BIG] = longer(1000)
    done = fetch(tmp_path, f"{DUMPS}/big.gz", settings=(*big.settings, "fetch.retries=2"))
    assert_one_line_error(done, "big.gz", code=75)
    assert "big.gz" not in fetched(tmp_path)


@pytest.mark.parametrize("size", [30_000, 60_000])  # less and more than the file has
@pytest.mark.parametrize("always", [fields(), whole, NO_VALIDATORS])
def test_what_a_power_cut_left_of_a_file_without_a_checksum_is_not_trusted(
    always: Fault, size: int, tmp_path: Path, big: Web
) -> None:
    big.site.always[BIG] = always
    where = (tmp_path, f"{DUMPS}/*.gz")
    assert fetch(*where, settings=big.settings, options=("--list",)).returncode == 0
    (listing,) = tmp_path.glob("*.json")
    part = tmp_path / listing.stem / "big.gz.tmp"
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(bytes(size))
    assert fetch(*where, settings=big.settings).returncode == 0
    assert fetched(tmp_path) == {"big.gz": DATA}


@pytest.mark.parametrize("fault", [status(503), cut(-1), cut(0, reset=True)])
def test_a_server_that_went_down_is_not_asked_for_every_file(fault: Fault, tmp_path: Path) -> None:
    site = Site(below(HOST, {f"{n:03}.gz": b"%d" % n for n in range(100)}))
    with serving(site) as server:
        where, settings = (tmp_path, f"{DUMPS}/*.gz"), ("fetch.retries=1", "fetch.concurrency=4", *at(server))
        assert fetch(*where, settings=settings, options=("--list",)).returncode == 0
        site.always = dict.fromkeys(site.files, fault)
        server.requests.clear()
        assert_one_line_error(fetch(*where, settings=settings), HOST, code=75)
        assert len(server.requests) < 40
        site.always.clear()
        assert fetch(*where, settings=settings).returncode == 0
    assert len(fetched(tmp_path)) == 100


def test_a_file_that_is_longer_than_listed_is_refused_also_without_a_content_length(tmp_path: Path, big: Web) -> None:
    def grown(request: Request, good: Respond) -> Answer:
        return good(request) if request.method == "HEAD" else Answer(DATA + b"more", chunked=True)

    big.site.always[BIG] = grown
    done = fetch(tmp_path, f"{DUMPS}/big.gz", settings=(*big.settings, "fetch.retries=1"))
    assert done.returncode != 0 and "big.gz" in done.stderr and "big.gz" not in fetched(tmp_path)
