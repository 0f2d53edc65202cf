import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, InputError
from common.settings import BlacklistSettings
from corpus.urls.domain_lists import DomainBlocklist
from corpus.urls.rules import UrlRules
from tests.conftest import Command
from tests.helpers import assert_one_line_error


def rules_of(folder: Path, data: bytes | str) -> UrlRules:
    """The rules with one user list."""
    path = folder / "list.txt"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return UrlRules(BlacklistSettings(domain_lists=[path]))


def dropped(rules: UrlRules, *hosts: str) -> list[bool]:
    """Which hosts the lists drop."""
    return [rules.reason(f"http://{host}/page") == "domain" for host in hosts]


@pytest.mark.parametrize(
    "entry",
    [
        "shop.example",
        "www.shop.example",
        "SHOP.Example.",
        "*.shop.example",
        ".shop.example",
        "http://shop.example",
        "https://www.shop.example/",
        "//shop.example/",
        "shop.example/",
        "shop.example:8080",
        "http://shop.example:8080/",
        "0.0.0.0 shop.example",
        "127.0.0.1\tlocalhost local www.shop.example # a shop",
        "::1 shop.example",
        "0 shop.example",
        "fe80::1%lo0 shop.example",
        "||shop.example^",
        "||shop.example^$important",
        "shop.*",
        "shop",
        "\ufeffshop.example",
        "shop.example#glued",
        "ｓｈｏｐ.example",
    ],
)
@pytest.mark.parametrize("ending", ["\n", "\r\n", ""])
def test_an_entry_in_any_form_drops_its_host_and_everything_below_it(tmp_path: Path, entry: str, ending: str) -> None:
    rules = rules_of(tmp_path, entry + ending)
    assert dropped(rules, "shop.example", "www.shop.example", "a.b.shop.example:81") == [True] * 3
    assert dropped(rules, "my-shop.example", "example.org", "shop.example.org", "local.com") == [False] * 4
    assert rules.domains.lists[1].unusable == 0


def test_a_host_below_a_registered_domain_drops_only_its_subtree(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, "sub.foo.example\nwww.books.blogspot.com\nwww.gov.uk\n")
    assert dropped(rules, "sub.foo.example", "a.sub.foo.example", "www.sub.foo.example") == [True] * 3
    assert dropped(rules, "foo.example", "other.foo.example", "subsub.foo.example") == [False] * 3
    assert dropped(rules, "books.blogspot.com", "www.books.blogspot.com", "films.blogspot.com") == [True, True, False]
    assert dropped(rules, "www.gov.uk", "nhs.gov.uk") == [True, False]  # gov.uk is a public suffix


def test_addresses_and_international_names_are_entries(tmp_path: Path) -> None:
    text = "192.0.1.1\n[2606:4700::1]\n2606:4700:0::2\nbücher.example\nxn--mller-kva.example\n".encode()
    rules = rules_of(tmp_path, text + "straße.example\n".encode("latin-1"))
    assert rules.domains.lists[1].unusable == 0
    hosts = "192.0.1.1 [2606:4700::1] [2606:4700::2] bücher.example www.müller.example straße.example"
    assert dropped(rules, *hosts.split()) == [True] * 6
    assert dropped(rules, "192.0.1.2", "1.192.0.1", "[2606:4700::3]") == [False] * 3


def test_a_name_of_digits_never_matches_an_address() -> None:
    rules = UrlRules(BlacklistSettings(extra_domains=["163"]))
    assert dropped(rules, "163.com", "163.53.2.1") == [True, False]


NO_ENTRIES = "# comment\n\n! Adblock's\n[Adblock Plus 2.0]\n127.0.0.1 localhost\n   # indented\n## heading ##\n"
UNUSABLE = (
    "foo.example/path\n/ads[0-9]+/\n||foo.example^$third-party\n@@||foo.example^\nfoo.example##.banner\ntwo words\n"
    "co.uk\n*.com\n.gov.au\n-foo.example\nfoo..example\n*\nfoo*.example\n1.2.3\nhttp://user:word@foo.example/\n,\n\x00\x01\n"
)


def test_entries_that_can_never_match_are_counted_and_the_first_is_named(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "list.txt").write_text(f"{NO_ENTRIES}good.example\n{UNUSABLE}")
    (tmp_path / "urls.txt").write_text("http://foo.example/page\nhttp://good.example/page\n")
    config = f"run: x\nurls: [x]\nblacklist: {{domain_lists: [{tmp_path}/list.txt], extra_domains: [a, b/c]}}\n"
    (tmp_path / "config.yaml").write_text(config)
    options = [option for name in ("input urls.txt", "output out", "stats s.json", "config config.yaml")
               for option in (f"--{name.split()[0]}", tmp_path / name.split()[1])]  # fmt: skip
    result = command("corpus.blacklist", *options, "--workers", 2)
    assert result.returncode == 0 and (tmp_path / "out").read_text() == "http://foo.example/page\n"
    first, second = result.stderr.strip().splitlines()
    count = len(UNUSABLE.splitlines())
    assert f"list.txt: {count} of {count + 1} entries can never match; the first: {tmp_path}/list.txt:9:" in first
    assert "'foo.example/path' (a path" in first and "blacklist.extra_domains: 1 of 2" in second
    lists = json.loads((tmp_path / "s.json").read_text())["domain_lists"]
    assert lists[f"{tmp_path}/list.txt"]["unusable"] == count
    assert (
        lists["blacklist.extra_domains"]["first_unusable"]
        == "blacklist.extra_domains:2: 'b/c' (a path or a regular expression)"
    )


@pytest.mark.parametrize("data", [UNUSABLE.encode(), b"\x89PNG\r\n\x1a\n\x00\x00\xff", b"/a/\n/b/\n"])
def test_a_list_without_a_usable_entry_is_an_error(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(InputError, match=r"list\.txt: (\d+) of \1 entries can never match; the first: .*list\.txt:1: "):
        rules_of(tmp_path, data)
    with pytest.raises(ConfigError, match=r"blacklist\.extra_domains: 1 of 1"):
        UrlRules(BlacklistSettings(extra_domains=["http://foo.example/path"]))
    with pytest.raises(ConfigError, match=r"blacklist\.extra_suffixes: 1 of 1"):
        UrlRules(BlacklistSettings(extra_suffixes=["a b"]))


def test_a_list_without_a_usable_entry_is_a_one_line_error_of_the_command(tmp_path: Path, command: Command) -> None:
    (tmp_path / "list.txt").write_text("/a/\n")
    (tmp_path / "urls.txt").write_text("http://foo.example/page\n")
    (tmp_path / "config.yaml").write_text(f"run: x\nurls: [x]\nblacklist: {{domain_lists: [{tmp_path}/list.txt]}}\n")
    paths = ["--input", tmp_path / "urls.txt", "--output", tmp_path / "out", "--config", tmp_path / "config.yaml"]
    assert_one_line_error(command("corpus.blacklist", *paths, "--workers", 2), "list.txt:1: '/a/'", "domain_lists")
    assert not (tmp_path / "out").exists()


def test_an_empty_list_is_not_an_error(tmp_path: Path) -> None:
    assert rules_of(tmp_path, NO_ENTRIES).domains.lists[1].entries == 0


def test_a_suffix_may_be_public_and_may_be_written_like_any_entry() -> None:
    rules = UrlRules(BlacklistSettings(extra_suffixes=[".gov.au", "*.Blogs.example.", "xyz", "www.one.example"]))
    assert dropped(rules, "www.health.gov.au", "a.blogs.example", "any.xyz", "www.one.example") == [True] * 4
    assert dropped(rules, "gov.au.example", "my-blogs.example", "xyz.example", "one.example") == [False] * 4


@given(
    st.lists(st.text(max_size=20) | st.from_regex(r"[*|.]{0,2}[a-c]{1,2}(\.[a-c]{1,2}){0,2}[/^:.]?", fullmatch=True))
)
def test_any_entry_is_used_or_counted_as_unusable(entries: list[str]) -> None:
    try:
        domains = DomainBlocklist(BlacklistSettings(extra_domains=["sure.example", *entries]))
    except UnicodeEncodeError:  # lone surrogates, which no file can hold
        return
    (result,) = (given for given in domains.lists if given.name == "blacklist.extra_domains")
    assert domains.blocks("a.sure.example") and result.unusable <= result.entries <= 1 + sum(
        max(1, len(entry.split())) for entry in entries
    )
    assert bool(result.first) == bool(result.unusable)
