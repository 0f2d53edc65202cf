import re

import ftfy
import pytest
from ftfy.badness import MOJIBAKE_CATEGORIES
from hypothesis import example, given
from hypothesis import strategies as st

from corpus.text.repair import fix_text, repair

PLAIN = "".join(map(chr, range(32, 127))) + "\t\n\f–—…"
# what ftfy's steps act on, beside what they leave alone
SIGNS = "&;#<>\r\x00\x0b\x1b\x1f\x7f\x80\x85\x9f\u2028\u2029ﬁǆＡﾊ\u3000\u0301Å\ud83d\udca9\ufeff\ufffd\xa0"
MOJIBAKE = "".join(characters for characters in MOJIBAKE_CATEGORIES.values() if "-" not in characters)
PIECES = st.sampled_from(
    [
        "&amp;",
        "&eacute;",
        "<b>",
        "\x1b[31m",
        "schÃ¶n",
        "â€œquotedâ€",
        "donâ€™t",
        "\r\n",
        "\n",
        "a\u0301",
        "Ã ",
        "“é”",
        "’s",
    ]
)


def test_mojibake_entities_and_control_characters_are_repaired() -> None:
    assert repair("schÃ¶n &amp; gut") == "schön & gut"
    assert repair("a\x00b") == "ab"
    assert repair("  one \t two \n\n\n\n  three  ", fold=True) == "one two\n\nthree"


@given(
    st.lists(st.one_of(st.text(PLAIN + "‘’“”"), st.text(PLAIN + "àéöÿß÷"), st.text(PLAIN + SIGNS), PIECES)).map("".join)
)
def test_the_short_cut_gives_what_ftfy_gives(text: str) -> None:
    assert fix_text(text) == ftfy.fix_text(text)


@given(st.text("aé —ã…â‘’“”", max_size=8))
@example("é”“")  # in Windows-1252 the bytes of a Chinese character
def test_quotes_beside_accented_letters_may_be_mojibake(text: str) -> None:
    assert fix_text(text) == ftfy.fix_text(text)


@given(st.lists(st.one_of(st.text(MOJIBAKE, max_size=4), st.text(max_size=5), PIECES)).map("".join))
def test_the_short_cut_gives_what_ftfy_gives_among_the_characters_of_mojibake(text: str) -> None:
    assert fix_text(text) == ftfy.fix_text(text)


@pytest.mark.parametrize("others", ["‘’“”", "".join(map(chr, (*range(0xE0, 0xF7), *range(0xF8, 0x100))))])
def test_lines_the_short_cut_answers_are_never_bad(others: str) -> None:
    # ftfy.badness looks at up to five characters; letters and digits stand for themselves
    alphabet = "aZ0 .,?!-–—…" + (others if len(others) < 10 else others[::7])
    texts = [a + b + c for a in alphabet for b in alphabet for c in alphabet]
    texts += [f"x{a}{b} y" for a in others for b in others + PLAIN]
    changed = re.compile("[‘’“”]")
    for text in texts:
        assert changed.sub("'", ftfy.fix_text(text).replace('"', "'")) == changed.sub("'", text).replace('"', "'")


def test_a_line_with_markup_stops_the_decoding_of_entities_from_there_on() -> None:
    text = "a &amp; b\nc &lt; d <i>\ne &amp; f’s\nplain\ng &amp; “h”\n"
    assert fix_text(text) == ftfy.fix_text(text) == 'a & b\nc &lt; d <i>\ne &amp; f\'s\nplain\ng &amp; "h"\n'


def test_a_line_longer_than_ftfy_reads_at_once_is_repaired_like_by_it() -> None:
    text = "é’" * 600_000 + "&amp; schÃ¶n <b> &amp;\nafter &amp; all"
    assert fix_text(text) == ftfy.fix_text(text)
