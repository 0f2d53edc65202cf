"""What a source lists, once per run, and what the files are called here."""

import gzip
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.corpus.remote.conftest import NUMBERS, Web
from tests.corpus.remote.fetching import DUMPS, HOST, at, below, everything, fetch, fetched, listed
from tests.corpus.remote.servers import Site, apache_page, chunked, cut, moved, nginx_page, no_head, serving, status
from tests.helpers import assert_one_line_error, called

ODD = [
    "a b.gz",
    "ümläut & <b>.gz",
    "100%25.gz",
    "plus+and=.gz",
    "semi;colon.gz",
    "que?ry#.gz",
    f"{'long' * 20}.gz",
    "日本.gz",
]


@pytest.mark.parametrize("page", [apache_page, nginx_page])
def test_the_pages_of_apache_and_nginx_list_the_files_below_them_and_nothing_else(
    page: Callable[[str, Iterable[str]], bytes], tmp_path: Path
) -> None:
    wanted = {name: name.encode() for name in ODD}
    others = {"readme.txt": b"", "in/x.gz": b"", "index.gz.html": b""}
    site = Site(below(HOST, wanted | others) | {f"{HOST}/up.gz": b""}, page)
    with serving(site) as server:
        done = fetch(tmp_path, f"{DUMPS}/*.gz", settings=at(server))
        assert done.returncode == 0, done
        assert sorted(set(server.asked())) == sorted(below(HOST, {"": b"", **wanted}))
        assert not any("C=" in request.path for request in server.requests)
    assert fetched(tmp_path) == wanted


def test_links_to_files_of_the_folder_count_however_they_are_written(tmp_path: Path, web: Web) -> None:
    links = [
        *("/dumps/0.jsonl.gz", f"https://{HOST}/dumps/1.jsonl.gz", f"//{HOST}/dumps/2.jsonl.gz", "./3.jsonl.gz"),
        *("../4.jsonl.gz", "?C=N;O=D", "#top", "mailto:me@files.example", "javascript:void(0)", "0.jsonl.gz"),
        *("https://other.example/dumps/5.jsonl.gz", f"ftp://{HOST}/dumps/6.jsonl.gz", "http://[bad/7.jsonl.gz"),
    ]
    web.site.pages[f"{HOST}/dumps/"] = "".join(f"<a href='{link}'>x</a>" for link in links).encode()
    done = fetch(tmp_path, f"{DUMPS}/*.gz", settings=web.settings)
    assert done.returncode == 0, done
    assert fetched(tmp_path) == {name: NUMBERS[name] for name in list(NUMBERS)[:4]}
    assert {name.partition("/")[0] for name in web.server.asked()} == {HOST}


def test_a_page_and_a_list_may_have_megabytes(tmp_path: Path, web: Web) -> None:
    links = "".join(f"<a href='other-{n}.txt'>x</a>" for n in range(50_000))
    web.site.pages[f"{HOST}/dumps/"] = f"{links}<a href='3.jsonl.gz'>x</a>".encode()
    assert fetch(tmp_path, f"{DUMPS}/*.gz", settings=web.settings).returncode == 0
    assert fetched(tmp_path) == {"3.jsonl.gz": NUMBERS["3.jsonl.gz"]}


def test_a_pattern_for_folders_reads_only_the_pages_that_it_needs(tmp_path: Path) -> None:
    files = {
        "2024/x-1.gz": b"1",
        "2024/y-1.gz": b"2",
        "2025/x-1.gz": b"3",
        "other/x-1.gz": b"4",
        "2025/deep/x-2.gz": b"",
    }
    with serving(Site(below(HOST, files))) as server:
        done = fetch(tmp_path, f"{DUMPS}/20*/x-*.gz", settings=at(server))
        assert done.returncode == 0, done
        pages = sorted({name for name in server.asked() if name.endswith("/")})
        assert pages == sorted(below(HOST, {"": b"", "2024/": b"", "2025/": b""}))
    assert fetched(tmp_path) == {"2024/x-1.gz": b"1", "2025/x-1.gz": b"3"}


def test_one_file_is_fetched_without_a_listing_of_its_folder(tmp_path: Path, web: Web) -> None:
    done = fetch(tmp_path, f"{DUMPS}/1.jsonl.gz", settings=web.settings)
    assert done.returncode == 0, done
    assert fetched(tmp_path) == {"1.jsonl.gz": NUMBERS["1.jsonl.gz"]} and web.server.asked() == [
        f"{HOST}/dumps/1.jsonl.gz"
    ]


@pytest.mark.parametrize("name", ["wet.paths.gz", "wet.paths"])
def test_a_list_of_paths_fetches_the_files_that_it_names(name: str, tmp_path: Path) -> None:
    files = {"crawl-data/A/wet/00.warc.wet.gz": b"00", "crawl-data/A/wet/01.warc.wet.gz": b"01"}
    lines = "".join(f"{path}\n" for path in files).encode()
    listing = {f"crawl-data/A/{name}": gzip.compress(lines) if name.endswith(".gz") else lines}
    site = Site({f"{HOST}/{path}": data for path, data in (files | listing).items()})
    with serving(site) as server:
        done = fetch(tmp_path, f"https://{HOST}/crawl-data/A/{name}", settings=at(server))
        assert done.returncode == 0, done
    assert sorted(data for data in fetched(tmp_path).values() if data.isdigit()) == [b"00", b"01"]


def test_long_pages_and_long_lists_are_read_to_their_end(tmp_path: Path) -> None:
    pages = {f"x-{n:05}.gz": b"%d" % n for n in range(5000)}  # 700 KB of HTML
    lines = "".join(f"dumps/{name}\n" for name in pages).encode()
    site = Site(below(HOST, pages) | {f"{HOST}/lists/wet.paths": lines})
    last = {"x-04999.gz": b"4999"}
    with serving(site) as server:
        site.faults[f"{HOST}/dumps/"] = [cut(500_000), lambda request, good: chunked(request, good), status(503)]
        for folder in ("cut", "chunked"):
            done = fetch(tmp_path / folder, f"{DUMPS}/*4999.gz", settings=at(server))
            assert done.returncode == 0, done
            assert fetched(tmp_path / folder) == last
        site.faults[f"{HOST}/lists/wet.paths"] = [cut(50_000)]
        config = tmp_path / "config.yaml"
        source = f"{{path: 'https://{HOST}/lists/wet.paths', glob: ['*4999.gz']}}"
        config.write_text(f"run: {tmp_path}/run\nsources: [{source}]\n")
        done = called("corpus.fetch", "--config", config, "fetch.retry_delay=0.01", *at(server))
        assert done.returncode == 0, done
    assert list(fetched(tmp_path / "run" / "fetch").values()) == [b"4999"]


@pytest.mark.parametrize(
    "content",
    [b"\x1f\x8bnot gzip", gzip.compress(b"a/b.gz\n", mtime=0)[:-9], b"\xff\xfe\n"],
    ids=["damaged", "cut", "not UTF-8"],
)
def test_a_list_of_paths_that_cannot_be_read_is_one_line(content: bytes, tmp_path: Path) -> None:
    with serving(Site({f"{HOST}/wet.paths.gz": content})) as server:
        assert_one_line_error(fetch(tmp_path, f"https://{HOST}/wet.paths.gz", settings=at(server)), "wet.paths.gz")


@pytest.mark.parametrize("url", [DUMPS, f"{DUMPS}/"])
def test_a_folder_is_its_files_with_and_without_a_slash_at_the_end(url: str, tmp_path: Path, web: Web) -> None:
    """Without one, servers redirect to the folder's page, which is no file of the source."""
    assert fetch(tmp_path, url, settings=web.settings).returncode == 0
    assert {name.removeprefix("dumps/"): data for name, data in fetched(tmp_path).items()} == NUMBERS


@pytest.mark.parametrize("url", [f"https://{HOST}/my%20texts/*.gz", f"https://{HOST}/my%20texts/a%20b.gz"])
def test_a_url_is_taken_as_it_was_copied_from_a_browser(url: str, tmp_path: Path) -> None:
    with serving(Site({f"{HOST}/my texts/a b.gz": b"a b"})) as server:
        done = fetch(tmp_path, url, settings=at(server))
    assert done.returncode == 0, done
    assert fetched(tmp_path) == {"a b.gz": b"a b"}


def test_a_source_is_listed_once_until_it_is_renewed(tmp_path: Path, web: Web) -> None:
    asked = (tmp_path, f"{DUMPS}/*.gz")
    assert fetch(*asked, settings=web.settings).returncode == 0
    before = everything(tmp_path)
    web.site.files[f"{HOST}/dumps/new.gz"] = b"new"
    web.server.requests.clear()
    assert fetch(*asked, settings=web.settings).returncode == 0
    assert web.server.requests == [] and everything(tmp_path) == before
    del web.site.files[f"{HOST}/dumps/0.jsonl.gz"]
    assert fetch(*asked, settings=web.settings, options=("--renew",)).returncode == 0
    assert fetched(tmp_path) == {name: NUMBERS[name] for name in list(NUMBERS)[1:]} | {"new.gz": b"new"}
    assert web.server.asked()[1:] == [f"{HOST}/dumps/new.gz"]


def test_list_names_the_files_and_fetches_none(tmp_path: Path, web: Web) -> None:
    done = fetch(tmp_path, f"{DUMPS}/*.gz", settings=web.settings, options=("--list",))
    assert done.returncode == 0, done
    assert listed(tmp_path) == sorted(NUMBERS) and fetched(tmp_path) == {}
    assert "5 files" in done.stdout + done.stderr
    assert web.server.asked() == [f"{HOST}/dumps/"]
    assert fetch(tmp_path, f"{DUMPS}/*.gz", settings=web.settings).returncode == 0
    assert fetched(tmp_path) == NUMBERS and web.server.asked().count(f"{HOST}/dumps/") == 1


def test_a_file_that_was_deleted_is_fetched_again_and_a_damaged_listing_is_named(tmp_path: Path, web: Web) -> None:
    asked = (tmp_path, f"{DUMPS}/*.gz")
    assert fetch(*asked, settings=web.settings).returncode == 0
    (listing,) = tmp_path.glob("*.json")
    (tmp_path / listing.stem / "3.jsonl.gz").unlink()
    web.server.requests.clear()
    assert fetch(*asked, settings=web.settings).returncode == 0
    assert fetched(tmp_path) == NUMBERS and web.server.asked() == [f"{HOST}/dumps/3.jsonl.gz"]
    whole = listing.read_bytes()
    for damaged in (b"", whole[:-20], b"[]", b'{"files": []}'):
        listing.write_bytes(damaged)
        assert_one_line_error(fetch(*asked, settings=web.settings), listing.name)


def test_a_server_that_refuses_head_requests_is_asked_otherwise(tmp_path: Path, web: Web) -> None:
    web.site.always = dict.fromkeys(web.site.files, no_head)
    done = fetch(tmp_path, f"{DUMPS}/*.gz", settings=web.settings)
    assert done.returncode == 0, done
    assert fetched(tmp_path) == NUMBERS


def test_equal_listings_give_equal_folders_whatever_the_concurrency_and_the_order_of_the_page(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder, concurrency, order in zip(folders, (1, 8, 3), (sorted, sorted, reversed), strict=True):
        site = Site(below(HOST, NUMBERS), lambda path, names, order=order: nginx_page(path, order(list(names))))
        with serving(site) as server:
            settings = (f"fetch.concurrency={concurrency}", *at(server))
            assert fetch(folder, f"{DUMPS}/*.gz", settings=settings).returncode == 0
    assert fetched(folders[0]) == NUMBERS
    assert everything(folders[0]).keys() == everything(folders[1]).keys() == everything(folders[2]).keys()
    assert fetched(folders[0]) == fetched(folders[1]) == fetched(folders[2])


def test_two_sources_of_one_command_lie_apart(tmp_path: Path, web: Web) -> None:
    web.site.files |= below(HOST, {"0.jsonl.gz": b"another"}, "more")
    done = fetch(tmp_path, f"{DUMPS}/0*.gz", f"https://{HOST}/more/0.jsonl.gz", settings=web.settings)
    assert done.returncode == 0, done
    found = [path.read_bytes() for path in tmp_path.rglob("0.jsonl.gz")]
    assert sorted(found) == sorted([b"another", NUMBERS["0.jsonl.gz"]])


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"{DUMPS}/*.nothing", ".nothing"),
        (f"https://{HOST}/nowhere/*.gz", "nowhere"),
        (f"{DUMPS}/nothing.gz", "nothing.gz"),
        (f"https://user:hunter2@{HOST}/dumps/*.gz", "password"),
        (f"{DUMPS}/0.jsonl.gz?token=hunter2", "query"),
        (f"{DUMPS}/0.jsonl.gz#hunter2", "query"),
        ("ftp://files.example/dumps/*.gz", "ftp"),
        ("https:///dumps/*.gz", "host"),
    ],
)
def test_what_cannot_be_a_source_is_refused_in_one_line(url: str, said: str, tmp_path: Path, web: Web) -> None:
    done = fetch(tmp_path / "out", url, settings=web.settings)
    assert_one_line_error(done, said)
    assert "hunter2" not in done.stderr + done.stdout and fetched(tmp_path / "out") == {}
    if "hunter2" in url:
        assert web.server.requests == []


def test_a_path_among_urls_is_refused(tmp_path: Path, web: Web) -> None:
    assert_one_line_error(fetch(tmp_path, f"{DUMPS}/*.gz", "texts/a.gz", settings=web.settings), "texts/a.gz")


CONTACT = "scrape.contact=me@here.example"


def test_private_addresses_are_refused_unless_they_are_allowed(tmp_path: Path, web: Web) -> None:
    port = web.server.server_port
    url = f"http://127.0.0.1:{port}/dumps/0.jsonl.gz"
    for host in ("127.0.0.1", "localhost", "127.1", "0x7f000001", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254"):
        done = fetch(tmp_path, f"http://{host}:{port}/dumps/0.jsonl.gz", settings=(CONTACT,))
        assert_one_line_error(done, f"{host}:{port}", "leads to a")
    assert web.server.connections == 0
    web.site.files |= below(web.server.address, NUMBERS)
    done = fetch(tmp_path, url, settings=(CONTACT, "blacklist.allow_private_hosts=true"))
    assert done.returncode == 0, done
    assert fetched(tmp_path) == {"0.jsonl.gz": NUMBERS["0.jsonl.gz"]}


def test_a_name_that_leads_to_a_private_address_is_refused_also_after_a_redirect(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    loopback = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", web.server.server_port))]
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *given: loopback if host == "rebound.example" else look_up(host, *given),
    )
    done = fetch(tmp_path, "http://rebound.example/dumps/0.jsonl.gz", settings=(CONTACT,))
    assert_one_line_error(done, "private")
    assert web.server.connections == 0
    web.site.always[f"{HOST}/dumps/0.jsonl.gz"] = moved("http://rebound.example/dumps/0.jsonl.gz")
    done = fetch(tmp_path, f"{DUMPS}/0.jsonl.gz", settings=(CONTACT, *at(web.server, HOST)))
    assert_one_line_error(done, "private")
    assert {request.host for request in web.server.requests} == {HOST}


def test_a_proxy_of_the_environment_is_asked(tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://{web.server.address}")
    done = fetch(tmp_path, f"http://{HOST}/dumps/*.gz", settings=(CONTACT,))
    assert done.returncode == 0, done
    assert fetched(tmp_path) == NUMBERS
    assert {request.path.partition("/dumps")[0] for request in web.server.requests} == {f"http://{HOST}"}


def test_site_owners_see_who_asks(tmp_path: Path, web: Web) -> None:
    fetch(tmp_path, f"{DUMPS}/*.gz", settings=(*web.settings, "scrape.contact=me@here.example"))
    assert {request.headers["user-agent"] for request in web.server.requests} == {"urls-to-gpt2/0.1 (me@here.example)"}
