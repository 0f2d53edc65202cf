import ftfy
from ftfy.badness import MOJIBAKE_CATEGORIES
from hypothesis import example, given
from hypothesis import strategies as st

from corpus.clean import fix_text, repair

PLAIN = "".join(map(chr, range(32, 127))) + "\t\n\f–—…"
# what ftfy's steps act on, beside what they leave alone
SIGNS = "&;#<>\r\x00\x0b\x1b\x1f\x7f\x80\x85\x9f\u2028\u2029ﬁǆＡﾊ\u3000\u0301Å\ud83d\udca9\ufeff\ufffd\xa0"
MOJIBAKE = "".join(characters for characters in MOJIBAKE_CATEGORIES.values() if "-" not in characters)
PIECES = st.sampled_from("&amp; &eacute; <b> \x1b[31m schÃ¶n â€œquotedâ€ donâ€™t \r\n \n a\u0301 Ã  “é” ’s".split(" "))
TEXTS = st.one_of(
    *(st.text(PLAIN + more) for more in ("‘’“”", "àéöÿß÷", SIGNS)),
    *(st.text("aé —ã…â‘’“”", max_size=8), st.text(MOJIBAKE, max_size=4), st.text(max_size=5), PIECES),
)


def test_mojibake_entities_and_control_characters_are_repaired() -> None:
    assert repair("schÃ¶n &amp; gut") == "schön & gut"
    assert repair("a\x00b") == "ab"
    assert repair("  one \t two \n\n\n\n  three  ", fold=True) == "one two\n\nthree"


@given(st.lists(TEXTS).map("".join))
@example("é”“")  # in Windows-1252 the bytes of a Chinese character
@example("a &amp; b\nc &lt; d <i>\ne &amp; f’s\nplain\ng &amp; “h”\n")  # markup: entities stay from there on
@example("é’" * 510_000 + "&amp; schÃ¶n <b> &amp;\nafter &amp; all")  # longer than ftfy reads at once
def test_the_short_cut_gives_what_ftfy_gives(text: str) -> None:
    assert fix_text(text) == ftfy.fix_text(text)
