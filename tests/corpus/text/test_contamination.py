from hypothesis import given
from hypothesis import strategies as st

from common.settings import DecontaminateSettings
from corpus.text.ngrams import pieces

SETTINGS = DecontaminateSettings(cut_characters=10, min_characters=5, max_pieces=3)


@given(
    text=st.text("ab.!? ", max_size=120),
    spans=st.lists(st.tuples(st.integers(0, 119), st.integers(1, 20)), max_size=5),
)
def test_what_is_kept_is_text_outside_of_every_margin(text: str, spans: list[tuple[int, int]]) -> None:
    within = sorted((start, min(len(text), start + size)) for start, size in spans if start < len(text))
    marked = "".join("#" if any(a <= index < b for a, b in within) else c for index, c in enumerate(text))
    left = pieces(text, within, SETTINGS)
    assert all(len(piece) > 5 for piece in left)
    start = 0
    for piece, found in zip(left, pieces(marked, within, SETTINGS), strict=True):
        assert piece == found and "#" not in found, "nothing of a match is left"
        assert piece in text[start:]
        start = text.index(piece, start) + len(piece)
    if not within:
        assert left == ([text.strip()] if len(text.strip()) > 5 else [])
