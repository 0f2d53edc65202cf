"""Each rule at its threshold and beyond it; C4, FineWeb and repetition as datatrove decides."""

from pydoc_data.topics import topics

import pytest

from common.settings import CleanSettings
from corpus.text.filters import filters
from corpus.text.verdicts import Change, Text, Verdict
from tests.corpus.text.test_filters import details

pytest.importorskip("spacy", reason="spaCy is not installed: it has no wheel for this Python")


def judged(name: str, text: str) -> Verdict:
    *_, rule = filters(CleanSettings(language="", min_characters=0, filters=[name]))
    return rule.judge(Text(text))


DAYS = "the words of all days"
# A text at the threshold of a rule, which is kept, and one beyond it.
EDGES = [
    ("words", "the of " + "word " * 48, "the of " + "word " * 47),  # 50 at least
    ("words", "the of " + "word " * 99_998, "the of " + "word " * 99_999),  # 100,000 at most
    ("word_length", "the of word " + "abc " * 60, "the of " + "abc " * 60),
    ("word_length", f"the of {'a' * 25} " + f"{'b' * 10} " * 60, f"the of {'a' * 26} " + f"{'b' * 10} " * 60),
    ("symbols", f"the of {'word ' * 7}# " * 6, f"the of {'word ' * 7}## " * 6),
    ("bullets", "- words of the words\n" * 9 + "the words of the words", "- words of the words\n" * 10),
    ("ellipsis", f"{DAYS}…\n" * 3 + f"{DAYS}\n" * 7, f"{DAYS}…\n" * 4 + f"{DAYS}\n" * 9),
    ("alphabetic", "the of word word 1234 " * 12, "the of word word 1234 " * 12 + "1234 "),
    ("stop_words", "the of " + "word " * 50, "the " + "word " * 51),
]


@pytest.mark.parametrize(("rule", "kept", "dropped"), EDGES)
def test_each_of_gophers_rules_has_its_threshold(rule: str, kept: str, dropped: str) -> None:
    settings = CleanSettings(language="", min_characters=0, filters=["gopher"])
    assert details(kept, settings) == {}
    assert details(dropped, settings).keys() == {f"gopher_{rule}"}


SENTENCES = [f"This is sentence number {number} of the page." for number in range(6)]


def test_c4_cuts_lines_that_are_no_sentences_and_counts_them() -> None:
    lines = [
        *SENTENCES,
        "A menu entry",
        "Read more...",
        "Too short.",
        f"One {'w' * 1001} word.",
        "Please enable JavaScript to see the page.",
        "This page uses cookies for you.",
        "A citation[12] and another[citation needed] are cut out.",
    ]
    expected = {"c4_no_end": 2, "c4_few_words": 1, "c4_long_word": 1, "c4_javascript": 1, "c4_policy": 1}
    text = "\n".join([*SENTENCES, "A citation and another are cut out."])
    assert judged("c4", "\n".join(lines)) == Change(text, expected)


LINES = [f"This line is long enough not to be short, number {number}." for number in range(120)]
ENTRIES = [f"a menu entry that is long enough {number}" for number in range(22)]


def short(count: int) -> list[str]:
    return [f"A short line, number {number}." for number in range(count)]


def unlike(count: int, start: int = 0) -> list[str]:
    return [f"word{number}" for number in range(start, start + count)]


# What each rule says of a text, or None if it keeps it.
JUDGED = [
    ("c4", "\n".join([*SENTENCES, "Lorem ipsum dolor sit amet."]), "lorem ipsum"),
    ("c4", "\n".join([*SENTENCES, "A function f() { return 1; } ends it."]), "a curly bracket"),
    ("c4", "\n".join([*SENTENCES, "A function f() { return 1 }"]), None),  # cut before its bracket is seen
    ("c4", "\n".join([*SENTENCES, "This page uses cookies {here}."]), "a curly bracket"),
    ("c4", " ".join(SENTENCES[:4]), "4 sentences"),
    ("c4", "Mr. Smith of the U.S. has 3.5 dogs. " * 4, "4 sentences"),
    ("c4", " ".join(SENTENCES[:5]), None),
    ("fineweb", "\n".join(LINES[:3] + ENTRIES), None),
    ("fineweb", "\n".join(LINES[:2] + ENTRIES), "end"),
    ("fineweb", "\n".join(LINES[:33] + short(67)), None),
    ("fineweb", "\n".join(LINES[:32] + short(68)), "30 characters"),
    ("fineweb", "\n".join(LINES + LINES[:1]), None),
    ("fineweb", "\n".join(LINES[:80] + LINES[:1]), "repeated"),
    ("fineweb", "\n".join(f"{n:032} of words." for n in range(10)), None),
    ("fineweb", "\n".join(f"{n:032}." for n in range(10)), "line breaks"),
    ("gopher_repetition", "\n".join(["same line", *(" ".join(unlike(20, 20 * n)) for n in range(20))]), None),
    ("gopher_repetition", "\n".join([*["same line"] * 5, *unlike(7)]), "lines repeat"),
    ("gopher_repetition", "\n\n".join([*["same", "here"] * 4, *unlike(10)]), "paragraphs repeat"),
    (
        "gopher_repetition",
        "\n".join([*[" ".join(unlike(30))] * 2, *unlike(30, 100), " ".join(unlike(30, 200))]),
        "in repeated lines",
    ),
    ("gopher_repetition", " ".join(f"some thing {word}" for word in unlike(30)), "'some thing'"),
    ("gopher_repetition", " ".join(unlike(40) + unlike(60, 100) + unlike(40)), "5-grams"),
    ("gopher_repetition", " ".join(unlike(9) + unlike(90, 100) + unlike(9)), None),
    ("digits", "1" * 30 + "a" * 70, None),
    ("digits", "1" * 31 + "a" * 69, "31 of 100 characters are digits"),
]


@pytest.mark.parametrize(("name", "text", "said"), JUDGED)
def test_the_rules_of_c4_fineweb_repetition_and_digits_have_their_thresholds(
    name: str, text: str, said: str | None
) -> None:
    found = judged(name, text)
    assert not isinstance(found, str) if said is None else isinstance(found, str) and said in found


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("c4", "C4Quality"), ("fineweb", "FineWebQuality"), ("gopher_repetition", "GopherRepetition")],
)
def test_it_decides_as_datatrove(name: str, theirs: str) -> None:
    data = pytest.importorskip("datatrove.data", reason="datatrove is not installed")
    rule = getattr(pytest.importorskip("datatrove.pipeline.filters"), f"{theirs}Filter")()
    for text in topics.values():
        document, found = data.Document(text=text, id=""), judged(name, text)
        assert (rule.filter(document) is True) != isinstance(found, str)
        assert not isinstance(found, Change) or found.text == document.text
