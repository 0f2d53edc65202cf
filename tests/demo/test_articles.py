import re

import pytest

from demo.articles import paragraphs, python_articles, sentence


def test_python_carries_hundreds_of_articles_of_plain_sentences_that_repeat_nothing() -> None:
    articles = python_articles()
    assert len(articles) >= 400 and sum(map(len, articles.values())) > 500_000
    assert min(map(len, articles.values())) >= 600
    blocks = [block for text in articles.values() for block in text.split("\n\n")]
    assert len(set(blocks)) == len(blocks)
    assert all(block[0].isupper() and block[-1] in ".!?" and "\n" not in block for block in blocks)
    text = " ".join(blocks)
    assert not re.search(r"[<>={}|\\`*_#@$~^\[\]]|::|https?:", text)
    words = text.split()
    ordinary = [word for word in words if re.fullmatch(r"\W*[A-Za-z][a-z]*(?:['’-][a-z]+)*\W*", word)]
    assert len(ordinary) > 0.93 * len(words), "names in capitals, numbers and dotted names are rare"
    assert len(set(re.findall(r"[a-z']+", text.lower()))) < 3500, "the words are common"


@pytest.mark.parametrize(
    "text",
    [
        ">>> sorted([3, 1, 2], reverse=True, key=lambda number: -number) and so on.",
        "| `x < y`, `x > y`, `x == y`, `x >= y`, `x <= y`, `x != y` | (3) |.",
        "SEEK_SET, SEEK_CUR, SEEK_END, O_RDONLY, O_WRONLY and O_RDWR are names.",
        'The words "that are quoted" stand in the middle of a sentence.',
        "An array with 3 rows has as many columns as it has rows.",
        "A remark (in parentheses) is no plain sentence for a tiny model.",
        f"A sentence that is far too long for a tiny model, because it goes on{' and on' * 30}.",
        "Too short.",
        "a fragment that begins with a small letter, and has an end.",
        "A heading of forty characters and no full stop",
    ],
)
def test_code_tables_lists_of_names_and_fragments_are_no_sentences(text: str) -> None:
    assert sentence(text) == ""


def test_paragraphs_keep_their_plain_sentences_without_markup() -> None:
    text = """\
The first sentence of a paragraph is kept, e.g. this
one here. Then x = f(y) is not. The third sentence is kept again.

   for line in file:
       print(line)

* An item of a list is a paragraph of its own.
* Another item of the same list follows it.
"""
    assert list(paragraphs(text)) == [
        ["The first sentence of a paragraph is kept, e.g. this one here.", "The third sentence is kept again."],
        ["An item of a list is a paragraph of its own."],
        ["Another item of the same list follows it."],
    ]
    marked = 'The *mapping* is copied into a :class:`~os.Environ` or a ``dict`` before "update" is called.'
    assert sentence(marked) == "The mapping is copied into a os.Environ or a dict before update is called."
