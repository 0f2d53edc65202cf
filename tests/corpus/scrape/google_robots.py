"""What Google's parser answers (github.com/google/robotstxt, robots_test.cc): 145 questions.

`CASES` are the lines of a table: a robots.txt with `|` between its lines (none: that of the line
above), `=>`, an agent, the paths that Google lets it fetch (+) and those it does not (-).
`DEPARTURES` are the questions that we answer differently.
"""

import re

_TABLE = """
# system
=> FooBot: +
user-agent: FooBot | disallow: / => : +
    => FooBot: -
=> : +
# line syntax
user-agent: FooBot | disallow: / => FooBot: -/x/y
foo: FooBot | bar: / => FooBot: +/x/y
user-agent FooBot | disallow / => FooBot: -/x/y
# groups
allow: /foo/bar/ |  | user-agent: FooBot | disallow: / | allow: /x/ | user-agent: BarBot | disallow: / | allow: /y/
    |  |  | allow: /w/ | user-agent: BazBot |  | user-agent: FooBot | allow: /z/ | disallow: / => FooBot: +/x/b +/z/d
    -/y/c -/foo/bar/
    => BarBot: +/y/c +/w/a -/z/d -/foo/bar/
    => BazBot: +/z/d -/foo/bar/
# other lines
User-agent: BarBot | Sitemap: https://foo.bar/sitemap | User-agent: * | Disallow: / => FooBot: -/
    => BarBot: -/
User-agent: FooBot | Invalid-Unknown-Line: unknown | User-agent: * | Disallow: / => FooBot: -/
    => BarBot: -/
# case of fields
USER-AGENT: FooBot | ALLOW: /x/ | DISALLOW: / => FooBot: +/x/y -/a/b
user-agent: FooBot | allow: /x/ | disallow: / => FooBot: +/x/y -/a/b
uSeR-aGeNt: FooBot | AlLoW: /x/ | dIsAlLoW: / => FooBot: +/x/y -/a/b
# case of agents
User-Agent: FOO BAR | Allow: /x/ | Disallow: / => Foo: +/x/y -/a/b
    => foo: +/x/y -/a/b
User-Agent: foo bar | Allow: /x/ | Disallow: / => Foo: +/x/y -/a/b
    => foo: +/x/y -/a/b
User-Agent: FoO bAr | Allow: /x/ | Disallow: / => Foo: +/x/y -/a/b
    => foo: +/x/y -/a/b
# two words
User-Agent: * | Disallow: / | User-Agent: Foo Bar | Allow: /x/ | Disallow: / => Foo: +/x/y
    => Foo Bar: -/x/y
# star
=> FooBot: +/x/y
user-agent: * | allow: / | user-agent: FooBot | disallow: / => FooBot: -/x/y
    => BarBot: +/x/y
user-agent: FooBot | allow: / | user-agent: BarBot | disallow: / | user-agent: BazBot | disallow: / => QuxBot: +/x/y
# case of paths
user-agent: FooBot | disallow: /x/ => FooBot: -/x/y
user-agent: FooBot | disallow: /X/ => FooBot: +/x/y
# longest
user-agent: FooBot | disallow: /x/page.html | allow: /x/ => FooBot: -/x/page.html
user-agent: FooBot | allow: /x/page.html | disallow: /x/ => FooBot: +/x/page.html -/x/
user-agent: FooBot | disallow: | allow: => FooBot: +/x/page.html
user-agent: FooBot | disallow: / | allow: / => FooBot: +/x/page.html
user-agent: FooBot | disallow: /x | allow: /x/ => FooBot: +/x/ -/x
user-agent: FooBot | disallow: /x/page.html | allow: /x/page.html => FooBot: +/x/page.html
user-agent: FooBot | allow: /page | disallow: /*.html => FooBot: +/page -/page.html
user-agent: FooBot | allow: /x/page. | disallow: /*.html => FooBot: +/x/page.html -/x/y.html
User-agent: * | Disallow: /x/ | User-agent: FooBot | Disallow: /y/ => FooBot: +/x/page -/y/page
# encoding
user-agent: FooBot | Disallow: / | Allow: /foo/bar?qux=taz&baz=http://foo.bar?tar&par => FooBot:
    +/foo/bar?qux=taz&baz=http://foo.bar?tar&par
user-agent: FooBot | Disallow: / | Allow: /foo/bar/ツ => FooBot: +/foo/bar/%E3%83%84 -/foo/bar/ツ
user-agent: FooBot | Disallow: / | Allow: /foo/bar/%E3%83%84 => FooBot: +/foo/bar/%E3%83%84 -/foo/bar/ツ
user-agent: FooBot | Disallow: / | Allow: /foo/bar/%62%61%7A => FooBot: +/foo/bar/%62%61%7A -/foo/bar/baz
# special characters
user-agent: FooBot | Disallow: /foo/bar/quz | Allow: /foo/*/qux => FooBot: +/foo/quz +/foo//quz +/foo/bax/quz
    -/foo/bar/quz
user-agent: FooBot | Disallow: /foo/bar$ | Allow: /foo/bar/qux => FooBot: +/foo/bar/qux +/foo/bar/ +/foo/bar/baz
    -/foo/bar
user-agent: FooBot | # Disallow: / | Disallow: /foo/quz#qux | Allow: / => FooBot: +/foo/bar -/foo/quz
# index.html
User-Agent: * | Allow: /allowed-slash/index.html | Disallow: / => foobot: +/allowed-slash/
    +/allowed-slash/index.html -/allowed-slash/index.htm -/anyother-url
# documentation
user-agent: FooBot | disallow: / | allow: /fish => FooBot: +/fish +/fish.html +/fish/salmon.html +/fishheads
    +/fishheads/yummy.html +/fish.html?id=anything -/bar -/catfish -/?id=fish -/Fish.asp
user-agent: FooBot | disallow: / | allow: /fish* => FooBot: +/fish +/fish.html +/fish/salmon.html +/fishheads
    +/fishheads/yummy.html +/fish.html?id=anything -/bar -/catfish -/?id=fish -/Fish.bar
user-agent: FooBot | disallow: / | allow: /fish/ => FooBot: +/fish/ +/fish/salmon +/fish/?salmon +/fish/salmon.html
    +/fish/?id=anything -/bar -/fish -/fish.html -/Fish/Salmon.html
user-agent: FooBot | disallow: / | allow: /*.php => FooBot: +/filename.php +/folder/filename.php
    +/folder/filename.php?parameters +//folder/any.php.file.html +/filename.php/ +/index?f=filename.php/ -/bar -/php/
    -/index?php -/windows.PHP
user-agent: FooBot | disallow: / | allow: /*.php$ => FooBot: +/filename.php +/folder/filename.php -/bar -/php/
    -/aaaphpaaa -//windows.PHP -/filename.php?p -/filename.php/ -/filename.php5 -/filename?php
user-agent: FooBot | disallow: / | allow: /fish*.php => FooBot: +/fish.php +/fishheads/catfish.php?parameters -/bar
    -/Fish.PHP
user-agent: FooBot | allow: /p | disallow: / => FooBot: +/page
user-agent: FooBot | allow: /folder | disallow: /folder => FooBot: +/folder/page
user-agent: FooBot | allow: /page | disallow: /*.htm => FooBot: -/page.htm
user-agent: FooBot | allow: /$ | disallow: / => FooBot: +/ -/page.html
"""
_LIMIT = 2083 * 8  # bytes of a line that Google reads
_LONG_A, _LONG_B, _LONG_NO = (f"/x/{letter * (_LIMIT - size)}" for letter, size in (("a", 9), ("b", 9), ("a", 12)))


def _cases() -> list[tuple[str, str, str, list[str], list[str]]]:
    """(name, robots.txt, agent, allowed paths, refused paths) of each line of the table."""
    cases, name, robots = [], "", ""
    for line in re.sub("\n    (?!=>)", " ", _TABLE.strip()).splitlines():
        before, arrow, after = line.partition("=>")
        if not arrow:
            name = line.removeprefix("# ")
            continue
        robots = robots if line.startswith("    ") else "\n".join(map(str.strip, before.split("|")))
        agent, _, paths = after.partition(":")
        allowed, refused = ([path[1:] for path in paths.split() if path[0] == sign] for sign in "+-")
        cases.append((name, robots, agent.strip(), allowed, refused))
    return cases


CASES = [
    *_cases(),
    ("long lines", f"user-agent: FooBot\ndisallow: {_LONG_NO}/qux", "FooBot", ["/fux"], [f"{_LONG_NO}/fux"]),
    (
        "long lines",
        f"user-agent: FooBot\ndisallow: /\nallow: {_LONG_A}/qux\nallow: {_LONG_B}/qux",
        "FooBot",
        [f"{_LONG_A}/qux", f"{_LONG_B}/fux"],
        ["/"],
    ),
]

_CALLER = "Google leaves the encoding of URLs to its callers; ours are always encoded"
_CUT = f"Google cuts lines at {_LIMIT:,} bytes, so that they mean other pages than their author wrote"
DEPARTURES = {
    ("encoding", "/foo/bar/ツ"): _CALLER,
    ("encoding", "/foo/bar/baz"): "RFC 9309, section 2.2.2: %62%61%7A is baz",
    ("long lines", f"{_LONG_NO}/fux"): _CUT,
    ("long lines", f"{_LONG_B}/fux"): _CUT,
}
"""(name of the case, path): why our answer is another one."""
