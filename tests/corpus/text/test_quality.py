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


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("Lorem ipsum dolor sit amet.", "lorem ipsum"),
        ("A function f() { return 1; } ends it.", "a curly bracket"),
        ("A function f() { return 1 }", None),  # cut before its bracket is seen
        ("This page uses cookies {here}.", "a curly bracket"),
    ],
)
def test_c4_drops_documents_for_what_stands_in_lines_that_it_would_keep(line: str, verdict: str | None) -> None:
    found = judged("c4", "\n".join([*SENTENCES, line]))
    assert found == verdict if verdict else isinstance(found, Change)


def test_c4_asks_for_five_sentences_wherever_they_stand() -> None:
    assert judged("c4", " ".join(SENTENCES[:4])) == "4 sentences"
    assert judged("c4", "Mr. Smith of the U.S. has 3.5 dogs. " * 4) == "4 sentences"
    assert isinstance(judged("c4", " ".join(SENTENCES[:5])), Change)


LINES = [f"This line is long enough not to be short, number {number}." for number in range(120)]
FINEWEB = [
    (LINES[:3] + [f"a menu entry that is long enough {n}" for n in range(22)], None),
    (
        LINES[:2] + [f"a menu entry that is long enough {n}" for n in range(22)],
        "end",
    ),
    (LINES[:33] + [f"A short line, number {n}." for n in range(67)], None),
    (
        LINES[:32] + [f"A short line, number {n}." for n in range(68)],
        "30 characters",
    ),
    (LINES[:120] + LINES[:1], None),
    (LINES[:80] + LINES[:1], "repeated"),
    ([f"{n:032} of words." for n in range(10)], None),
    ([f"{n:032}." for n in range(10)], "line breaks"),
]


@pytest.mark.parametrize(("lines", "said"), FINEWEB)
def test_each_of_finewebs_rules_has_its_threshold(lines: list[str], said: str | None) -> None:
    found = judged("fineweb", "\n".join(lines))
    assert found is None if said is None else isinstance(found, str) and said in found


def unlike(count: int, start: int = 0) -> list[str]:
    return [f"word{number}" for number in range(start, start + count)]


REPETITION = [
    ("\n".join(["same line", *(" ".join(unlike(20, 20 * n)) for n in range(20))]), None),
    ("\n".join([*["same line"] * 5, *unlike(7)]), "lines repeat"),
    ("\n\n".join([*["same", "here"] * 4, *unlike(10)]), "paragraphs repeat"),
    ("\n".join([*[" ".join(unlike(30))] * 2, *unlike(30, 100), " ".join(unlike(30, 200))]), "in repeated lines"),
    (" ".join(f"some thing {word}" for word in unlike(30)), "'some thing'"),
    (" ".join(unlike(40) + unlike(60, 100) + unlike(40)), "5-grams"),
    (" ".join(unlike(9) + unlike(90, 100) + unlike(9)), None),
]


@pytest.mark.parametrize(("text", "said"), REPETITION)
def test_repetition_of_lines_paragraphs_and_n_grams_is_found(text: str, said: str | None) -> None:
    found = judged("gopher_repetition", text)
    assert found is None if said is None else isinstance(found, str) and said in found


def test_more_than_thirty_percent_digits_are_too_many() -> None:
    assert judged("digits", "1" * 30 + "a" * 70) is None
    assert judged("digits", "1" * 31 + "a" * 69) == "31 of 100 characters are digits"


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
