import json
from pathlib import Path

import pytest

from common.errors import InputError
from common.settings import BlacklistSettings
from corpus.blacklist import main
from corpus.urls.rules import UrlRules


def rules_of(folder: Path, text: str) -> UrlRules:
    """The rules with one user list."""
    path = folder / "list.txt"
    path.write_text(text)
    return UrlRules(BlacklistSettings(domain_lists=[path]))


def dropped(rules: UrlRules, hosts: str) -> set[str]:
    """The hosts that the lists drop."""
    return {host for host in hosts.split() if rules.reason(f"http://{host}/page") == "domain"}


ENTRIES = (
    *("shop.example", "www.shop.example", "SHOP.Example.", "*.shop.example", ".shop.example", "http://shop.example"),
    *("https://www.shop.example/", "//shop.example/", "shop.example/", "shop.example:8080", "http://shop.example:80/"),
    *("0.0.0.0 shop.example", "127.0.0.1\tlocalhost local www.shop.example # a shop", "::1 shop.example"),
    *("0 shop.example", "||shop.example^", "||shop.example^$important", "shop.*", "shop", "ｓｈｏｐ.example"),
)


def test_an_entry_in_any_form_drops_its_host_and_everything_below_it(tmp_path: Path) -> None:
    below = "shop.example www.shop.example a.b.shop.example:81"
    for number, entry in enumerate(ENTRIES):
        rules = rules_of(tmp_path, entry + ("\n", "\r\n", "")[number % 3])
        hosts = dropped(rules, f"{below} my-shop.example example.org shop.example.org local.com")
        assert hosts == set(below.split()), entry
        assert (rules.domains.lists[1].entries, rules.domains.lists[1].unusable) == (1, 0), entry


def test_addresses_international_names_and_suffixes_are_entries(tmp_path: Path) -> None:
    entries = "192.0.1.1 [2606:4700::1] 2606:4700:0::2 bücher.example xn--mller-kva.example sub.foo.example www.gov.uk"
    rules = rules_of(tmp_path, entries.replace(" ", "\n"))
    hosts = "192.0.1.1 [2606:4700::1] [2606:4700::2] bücher.example www.müller.example a.sub.foo.example www.gov.uk"
    others = "192.0.1.2 1.192.0.1 [2606:4700::3] foo.example subsub.foo.example nhs.gov.uk"  # gov.uk is a public suffix
    assert dropped(rules, f"{hosts} {others}") == set(hosts.split())
    rules = UrlRules(BlacklistSettings(extra_suffixes=[".gov.au", "*.Blogs.example.", "xyz", "www.one.example"]))
    hosts = "www.health.gov.au blogs.example a.blogs.example any.xyz www.one.example"
    assert dropped(rules, f"{hosts} gov.au.example my-blogs.example xyz.example one.example") == set(hosts.split())


NO_ENTRIES = "# comment\n\n! Adblock's\n[Adblock Plus 2.0]\n127.0.0.1 localhost\n   # indented\n## heading ##\n"
UNUSABLE = (
    "foo.example/path\n/ads[0-9]+/\n||foo.example^$third-party\n@@||foo.example^\nfoo.example##.banner\ntwo words\n"
    "co.uk\n*.com\n-foo.example\nfoo..example\n*\n1.2.3\n"
)


def test_the_command_drops_the_domains_of_a_list_and_reports_its_unusable_entries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list.txt").write_text(f"{NO_ENTRIES}good.example\n{UNUSABLE}")
    (tmp_path / "urls.txt").write_text("http://foo.example/page\nhttp://good.example/page\n")
    names = {"input": "urls.txt", "output": "out", "rejects": "dropped", "stats": "stats.json"}
    options = [option for name, path in names.items() for option in (f"--{name}", str(tmp_path / path))]
    assert main([*options, "--workers", "1", f"blacklist.domain_lists=[{tmp_path}/list.txt]"]) == 0
    assert (tmp_path / "out").read_text() == "http://foo.example/page\n"
    assert '"reason":"domain"' in (tmp_path / "dropped").read_text()
    assert f"{tmp_path}/list.txt:9:" in capsys.readouterr().err
    lists = json.loads((tmp_path / "stats.json").read_text())["domain_lists"]
    count = len(UNUSABLE.splitlines())
    assert (lists[f"{tmp_path}/list.txt"]["unusable"], lists[f"{tmp_path}/list.txt"]["entries"]) == (count, count + 1)
    with pytest.raises(InputError, match=r"list\.txt:1: "):  # not one usable entry
        rules_of(tmp_path, UNUSABLE)
