import pytest

from common.settings import CleanSettings, GopherSettings
from corpus.text.filters import Text, filters
from tests.helpers import prose

GERMAN = (
    "Der Hund lief durch den Wald und suchte nach seinem Herrn, der am Morgen das Haus verlassen hatte. "
    "Es war ein kalter Tag im November, und die Blätter lagen schon lange auf dem Boden. "
) * 5


def findings(text: str, settings: CleanSettings | None = None) -> dict[str, str]:
    found = ((rule.name, rule.finding(Text(text))) for rule in filters(settings or CleanSettings()))
    return {name: finding for name, finding in found if finding is not None}


def test_the_default_rules_are_those_of_openwebtext_in_their_order() -> None:
    assert [rule.name for rule in filters(CleanSettings())] == ["empty", "javascript", "short", "language"]


def test_each_rule_says_what_it_found() -> None:
    assert findings(prose(1)) == {}
    assert findings("")["empty"] == "no text"
    assert findings("Please enable JavaScript.")["javascript"] == "25 characters with 'javascript'"
    assert "javascript" not in findings("Please enable JavaScript. " * 11)
    assert findings(prose(1)[:511]) == {"short": "511 characters"}
    assert findings(prose(1)[:512]) == {}
    assert findings(GERMAN) == {"language": "de"}
    assert findings("1234 " * 200) == {"language": "no letters"}


def test_rules_follow_the_configuration() -> None:
    assert findings(GERMAN, CleanSettings(language="de")) == findings(GERMAN, CleanSettings(language="")) == {}
    assert findings("Too short.", CleanSettings(language="", min_characters=5)) == {}
    assert (
        findings("javascript, much ado", CleanSettings(language="", min_characters=5, javascript_characters=10)) == {}
    )


GOOD = "The work of the day was long and we have more to do with it."


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("with that " * 24, "words"),
        ("with that " * 51, "words"),
        ("a b " * 30 + "the of", "word_length"),
        ("internationalisation " * 50 + "the of", "word_length"),
        ("the work of ## day with " * 12, "symbols"),
        ("the work of with... " * 20 + "day", "symbols"),
        ("- working of that day\n" * 13 + "the end", "bullets"),
        (f"{GOOD}\n" * 4 + "the work of the day and night…\n" * 2, "ellipsis"),
        ("the work of 12345 " * 15, "alphabetic"),
        ("work day house field " * 15 + "the", "stop_words"),
    ],
)
def test_each_of_gophers_rules_has_its_threshold(text: str, rule: str) -> None:
    settings = CleanSettings(language="", min_characters=0, gopher=GopherSettings(enabled=True, max_words=100))
    assert findings(text, settings).keys() == {f"gopher_{rule}"}


def test_gophers_rules_keep_prose_and_are_off_by_default() -> None:
    assert findings(prose(1), CleanSettings(gopher=GopherSettings(enabled=True))) == {}
    assert findings("work day house field " * 30, CleanSettings(language="")) == {}
