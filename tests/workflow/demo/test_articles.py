import re

from workflow.demo.articles import paragraphs, python_articles, sentence


def test_python_carries_hundreds_of_articles_of_plain_sentences_that_repeat_nothing() -> None:
    articles = python_articles()
    assert len(articles) >= 400 and sum(map(len, articles.values())) > 500_000
    assert min(map(len, articles.values())) >= 600
    blocks = [block for text in articles.values() for block in text.split("\n\n")]
    assert len(set(blocks)) == len(blocks)
    assert all(block[0].isupper() and block[-1] in ".!?" and "\n" not in block for block in blocks)
    text = " ".join(blocks)
    assert not re.search(r"[<>={}|\\`*_#@$~^\[\]]|::|https?:", text)
    assert len(set(re.findall(r"[a-z']+", text.lower()))) < 3500, "the words are common"


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
    for text in ("Too short.", "SEEK_SET, SEEK_CUR, SEEK_END, O_RDONLY and O_RDWR are names."):
        assert sentence(text) == ""
    marked = 'The *mapping* is copied into a :class:`~os.Environ` or a ``dict`` before "update" is called.'
    assert sentence(marked) == "The mapping is copied into a os.Environ or a dict before update is called."
