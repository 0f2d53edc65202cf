from pathlib import Path

from demo.articles import docstrings, heading, prose, python_articles, split_articles

PARAGRAPH = "A paragraph that is long enough to be told apart from others, number {0}. " * 4


def test_python_carries_a_few_hundred_articles_that_do_not_repeat_each_other() -> None:
    articles = python_articles()
    assert len(articles) >= 150 and sum(map(len, articles.values())) > 350_000
    assert min(map(len, articles.values())) >= 600
    long_blocks = [block for text in articles.values() for block in text.split("\n\n") if len(block) > 200]
    assert len(set(long_blocks)) == len(long_blocks)
    assert articles == python_articles()


def test_long_texts_are_cut_at_headings_or_between_paragraphs() -> None:
    paragraphs = [PARAGRAPH.format(n).strip() for n in range(30)]
    text = "\n\n".join([*paragraphs[:5], "Second part\n===========", *paragraphs[5:]])
    parts = list(split_articles("First part", text, set()))
    assert [title for title, _ in parts] == ["First part", "Second part", "Second part", "Second part"]
    assert "\n\n".join(body for _, body in parts).split("\n\n") == paragraphs
    assert list(split_articles("Again", "\n\n".join(paragraphs), set(paragraphs))) == []


def test_a_heading_is_an_underlined_line() -> None:
    assert heading("Title\n*****") == "Title"
    assert heading("Title") is None and heading("two\nlines") is None and heading(" code\n ====") is None


def test_docstrings_are_read_without_running_the_module(tmp_path: Path) -> None:
    module, long = tmp_path / "module.py", "A sentence of the documentation. " * 20
    module.write_text(f'#!/usr/bin/python\n\nr"""{long}\n\n    Two.\n    """\nraise SystemExit\n')
    assert docstrings(module) == f"{long}\n\nTwo."
    module.write_text(f'class A:\n    """{long}"""\n    def short(self):\n        """Short."""\n')
    assert docstrings(module) == f"A\n===\n\n{long}"
    for source in ("import os\n", "", "b'bytes'\n", "'unclosed", "def f(:\n"):
        module.write_text(source)
        assert docstrings(module) == ""


def test_prose_is_what_reads_as_sentences() -> None:
    sentence = 'The *mapping* is copied into a new ``dict`` before "update()" is called.'
    assert prose(f"   {sentence}") == "The mapping is copied into a new dict before update() is called."
    for code in (
        ">>> sorted([3, 1, 2], reverse=True, key=lambda number: -number)\n[1, 2, 3].",
        "yield_stmt ::= yield_expression, which is the grammar of a statement.",
        "def function(argument, other):\n    return argument + other, which is no prose.",
        "| `x < y`, `x > y`, `x == y`, `x >= y`, `x <= y`, `x != y` | (3) |.",
        "Too short.",
        "A heading of forty characters and no more end",
    ):
        assert prose(code) == "", code
