import pytest

from common.settings import CleanSettings
from corpus.text.filters import Text, filters
from tests.helpers import prose

GERMAN = (
    "Der Hund lief durch den Wald und suchte nach seinem Herrn, der am Morgen das Haus verlassen hatte. "
    "Es war ein kalter Tag im November, und die Blätter lagen schon lange auf dem Boden. "
) * 5


def details(text: str, settings: CleanSettings | None = None) -> dict[str, str]:
    found = ((rule.name, rule.detail(Text(text))) for rule in filters(settings or CleanSettings()))
    return {name: detail for name, detail in found if detail is not None}


def test_the_default_rules_are_those_of_openwebtext_and_say_what_they_found() -> None:
    assert [rule.name for rule in filters(CleanSettings())] == ["empty", "javascript", "short", "language"]
    assert details(prose(1)) == details("work day house field " * 30, CleanSettings(language="")) == {}
    assert details("") == {"empty": "no text", "short": "0 characters", "language": "no letters"}
    assert details("JavaScript " + prose(1)[:244])["javascript"] == "255 characters with 'javascript'"
    assert "javascript" not in details("JavaScript " + prose(1)[:245])
    assert details(prose(1)[:511]) == {"short": "511 characters"}
    assert details(prose(1)[:512]) == {}
    assert details(GERMAN) == {"language": "de"}
    assert details(GERMAN, CleanSettings(language="de")) == details(GERMAN, CleanSettings(language="")) == {}


# A text at the threshold of a rule, which is kept, and one beyond it.
EDGES = [
    ("words", "the of " + "word " * 48, "the of " + "word " * 47),  # 50 at least
    ("words", "the of " + "word " * 99_998, "the of " + "word " * 99_999),  # 100,000 at most
    ("word_length", "the of word " + "abc " * 60, "the of " + "abc " * 60),
    ("word_length", f"the of {'a' * 25} " + f"{'b' * 10} " * 60, f"the of {'a' * 26} " + f"{'b' * 10} " * 60),
    (
        "symbols",
        "the of word word word word word word word # " * 6,
        "the of word word word word word word word ## " * 6,
    ),
    ("bullets", "- words of the words\n" * 9 + "the words of the words", "- words of the words\n" * 10),
    (
        "ellipsis",
        "the words of all days…\n" * 3 + "the words of all days\n" * 7,
        "the words of days…\n" * 4 + "the words of days\n" * 9,
    ),
    ("alphabetic", "the of word word 1234 " * 12, "the of word word 1234 " * 12 + "1234 "),
    ("stop_words", "the of " + "word " * 50, "the " + "word " * 51),
]


@pytest.mark.parametrize(("rule", "kept", "dropped"), EDGES)
def test_each_of_gophers_rules_has_its_threshold(rule: str, kept: str, dropped: str) -> None:
    settings = CleanSettings(language="", min_characters=0, gopher=True)
    assert details(kept, settings) == {}
    assert details(dropped, settings).keys() == {f"gopher_{rule}"}
