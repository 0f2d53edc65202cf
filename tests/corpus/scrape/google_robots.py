"""What Google's parser answers (github.com/google/robotstxt, robots_test.cc of 2026), as data: its 145 questions.

A case is a robots.txt (`|` between its lines), an agent, the paths that Google lets it fetch and those it does not.
`DEPARTURES` are the questions to which we answer otherwise.
"""

from typing import NamedTuple


class Case(NamedTuple):
    """One robots.txt and some questions about it."""

    name: str
    robots: str
    agent: str
    allowed: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


_GROUPS = (
    "allow: /foo/bar/ | | user-agent: FooBot | disallow: / | allow: /x/ | user-agent: BarBot | disallow: / "
    "| allow: /y/ | | | allow: /w/ | user-agent: BazBot | | user-agent: FooBot | allow: /z/ | disallow: /"
)
_SITEMAP = "User-agent: BarBot | Sitemap: https://foo.bar/sitemap | User-agent: * | Disallow: /"
_UNKNOWN = "User-agent: FooBot | Invalid-Unknown-Line: unknown | User-agent: * | Disallow: /"
_FIELDS = [
    "USER-AGENT: FooBot | ALLOW: /x/ | DISALLOW: /",
    "user-agent: FooBot | allow: /x/ | disallow: /",
    "uSeR-aGeNt: FooBot | AlLoW: /x/ | dIsAlLoW: /",
]
_AGENTS = [f"User-Agent: {agent} | Allow: /x/ | Disallow: /" for agent in ("FOO BAR", "foo bar", "FoO bAr")]
_TWO_WORDS = "User-Agent: * | Disallow: / | User-Agent: Foo Bar | Allow: /x/ | Disallow: /"
_ONLY_OTHERS = "user-agent: FooBot | allow: / | user-agent: BarBot | disallow: / | user-agent: BazBot | disallow: /"
_STAR_AND_FOO = "user-agent: * | allow: / | user-agent: FooBot | disallow: /"
_QUERY = "/foo/bar?qux=taz&baz=http://foo.bar?tar&par"
_INDEX = "User-Agent: * | Allow: /allowed-slash/index.html | Disallow: /"
_LIMIT = 2083 * 8  # bytes of a line that Google reads
_LONG = {key: "/x/" + letter * (_LIMIT - 2 - len(f"{key}: ")) for key, letter in (("disallow", "a"), ("allow", "a"))}
_LONG_B = _LONG["allow"].replace("a", "b")
_TWO_LONG = f"disallow: / | allow: {_LONG['allow']}/qux | allow: {_LONG_B}/qux"
_FISH = ("/fish", "/fish.html", "/fish/salmon.html", "/fishheads", "/fishheads/yummy.html", "/fish.html?id=anything")
_NO_FISH = ("/bar", "/catfish", "/?id=fish")
_PHP = ("/filename.php", "/folder/filename.php")
_MORE_PHP = (
    "/folder/filename.php?parameters",
    "//folder/any.php.file.html",
    "/filename.php/",
    "/index?f=filename.php/",
)


def _foo(name: str, rules: str, allowed: tuple[str, ...] = (), refused: tuple[str, ...] = ()) -> Case:
    return Case(name, f"user-agent: FooBot | {rules}", "FooBot", allowed, refused)


CASES = [
    Case("system", "", "FooBot", ("",)),
    Case("system", "user-agent: FooBot | disallow: /", "", ("",)),
    _foo("system", "disallow: /", (), ("",)),
    Case("system", "", "", ("",)),
    _foo("line syntax", "disallow: /", (), ("/x/y",)),
    Case("line syntax", "foo: FooBot | bar: /", "FooBot", ("/x/y",)),
    Case("line syntax", "user-agent FooBot | disallow /", "FooBot", (), ("/x/y",)),
    Case("groups", _GROUPS, "FooBot", ("/x/b", "/z/d"), ("/y/c", "/foo/bar/")),
    Case("groups", _GROUPS, "BarBot", ("/y/c", "/w/a"), ("/z/d", "/foo/bar/")),
    Case("groups", _GROUPS, "BazBot", ("/z/d",), ("/foo/bar/",)),
    *(Case("other lines", text, agent, (), ("/",)) for text in (_SITEMAP, _UNKNOWN) for agent in ("FooBot", "BarBot")),
    *(Case("case of fields", text, "FooBot", ("/x/y",), ("/a/b",)) for text in _FIELDS),
    *(Case("case of agents", text, agent, ("/x/y",), ("/a/b",)) for text in _AGENTS for agent in ("Foo", "foo")),
    Case("two words", _TWO_WORDS, "Foo", ("/x/y",)),
    Case("two words", _TWO_WORDS, "Foo Bar", (), ("/x/y",)),
    Case("star", "", "FooBot", ("/x/y",)),
    Case("star", _STAR_AND_FOO, "FooBot", (), ("/x/y",)),
    Case("star", _STAR_AND_FOO, "BarBot", ("/x/y",)),
    Case("star", _ONLY_OTHERS, "QuxBot", ("/x/y",)),
    _foo("case of paths", "disallow: /x/", (), ("/x/y",)),
    _foo("case of paths", "disallow: /X/", ("/x/y",)),
    _foo("longest", "disallow: /x/page.html | allow: /x/", (), ("/x/page.html",)),
    _foo("longest", "allow: /x/page.html | disallow: /x/", ("/x/page.html",), ("/x/",)),
    _foo("longest", "disallow: | allow:", ("/x/page.html",)),
    _foo("longest", "disallow: / | allow: /", ("/x/page.html",)),
    _foo("longest", "disallow: /x | allow: /x/", ("/x/",), ("/x",)),
    _foo("longest", "disallow: /x/page.html | allow: /x/page.html", ("/x/page.html",)),
    _foo("longest", "allow: /page | disallow: /*.html", ("/page",), ("/page.html",)),
    _foo("longest", "allow: /x/page. | disallow: /*.html", ("/x/page.html",), ("/x/y.html",)),
    Case(
        "longest",
        "User-agent: * | Disallow: /x/ | User-agent: FooBot | Disallow: /y/",
        "FooBot",
        ("/x/page",),
        ("/y/page",),
    ),
    _foo("encoding", f"Disallow: / | Allow: {_QUERY}", (_QUERY,)),
    _foo("encoding", "Disallow: / | Allow: /foo/bar/ツ", ("/foo/bar/%E3%83%84",), ("/foo/bar/ツ",)),
    _foo("encoding", "Disallow: / | Allow: /foo/bar/%E3%83%84", ("/foo/bar/%E3%83%84",), ("/foo/bar/ツ",)),
    _foo("encoding", "Disallow: / | Allow: /foo/bar/%62%61%7A", ("/foo/bar/%62%61%7A",), ("/foo/bar/baz",)),
    _foo(
        "special characters",
        "Disallow: /foo/bar/quz | Allow: /foo/*/qux",
        ("/foo/quz", "/foo//quz", "/foo/bax/quz"),
        ("/foo/bar/quz",),
    ),
    _foo(
        "special characters",
        "Disallow: /foo/bar$ | Allow: /foo/bar/qux",
        ("/foo/bar/qux", "/foo/bar/", "/foo/bar/baz"),
        ("/foo/bar",),
    ),
    _foo("special characters", "# Disallow: / | Disallow: /foo/quz#qux | Allow: /", ("/foo/bar",), ("/foo/quz",)),
    Case(
        "index.html",
        _INDEX,
        "foobot",
        ("/allowed-slash/", "/allowed-slash/index.html"),
        ("/allowed-slash/index.htm", "/anyother-url"),
    ),
    _foo("long lines", f"disallow: {_LONG['disallow']}/qux", ("/fux",), (f"{_LONG['disallow']}/fux",)),
    _foo("long lines", _TWO_LONG, (f"{_LONG['allow']}/qux", f"{_LONG_B}/fux"), ("/",)),
    _foo("documentation", "disallow: / | allow: /fish", _FISH, (*_NO_FISH, "/Fish.asp")),
    _foo("documentation", "disallow: / | allow: /fish*", _FISH, (*_NO_FISH, "/Fish.bar")),
    _foo(
        "documentation",
        "disallow: / | allow: /fish/",
        ("/fish/", "/fish/salmon", "/fish/?salmon", "/fish/salmon.html", "/fish/?id=anything"),
        ("/bar", "/fish", "/fish.html", "/Fish/Salmon.html"),
    ),
    _foo(
        "documentation",
        "disallow: / | allow: /*.php",
        (*_PHP, *_MORE_PHP),
        ("/bar", "/php/", "/index?php", "/windows.PHP"),
    ),
    _foo(
        "documentation",
        "disallow: / | allow: /*.php$",
        _PHP,
        (
            "/bar",
            "/php/",
            "/aaaphpaaa",
            "//windows.PHP",
            *(f"/filename{end}" for end in (".php?p", ".php/", ".php5", "?php")),
        ),
    ),
    _foo(
        "documentation",
        "disallow: / | allow: /fish*.php",
        ("/fish.php", "/fishheads/catfish.php?parameters"),
        ("/bar", "/Fish.PHP"),
    ),
    _foo("documentation", "allow: /p | disallow: /", ("/page",)),
    _foo("documentation", "allow: /folder | disallow: /folder", ("/folder/page",)),
    _foo("documentation", "allow: /page | disallow: /*.htm", (), ("/page.htm",)),
    _foo("documentation", "allow: /$ | disallow: /", ("/",), ("/page.html",)),
]

_CALLER = "Google leaves the encoding of URLs to its callers; ours are always encoded"
_CUT = f"Google cuts lines at {_LIMIT:,} bytes, so that they mean other pages than their author wrote"
DEPARTURES = {
    ("encoding", "/foo/bar/ツ"): _CALLER,
    ("encoding", "/foo/bar/baz"): "RFC 9309, section 2.2.2: %62%61%7A is baz",
    ("long lines", f"{_LONG['disallow']}/fux"): _CUT,
    ("long lines", f"{_LONG_B}/fux"): _CUT,
}
"""(name of the case, path): why our answer is another one."""
