"""The index of 8-grams finds exactly what a comparison with every place of the dataset finds."""

import socket
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.progress import Meter
from corpus.index import IndexedDataset, content_of
from corpus.index.ngrams import SHORTEST, Match, Ngrams, longest_spans, open_ngrams, write_ngrams
from tests.corpus.index.helpers import written

WORD = st.integers(0, 2)  # few words, so that much is equal


def found_by(ngrams: Ngrams, dataset: IndexedDataset, query: list[int]) -> list[Match]:
    lengths = dataset.lengths.astype(np.int64)
    return ngrams.matches(np.array(query, np.int64), dataset.tokens, np.cumsum(lengths) - lengths, lengths)


def everywhere(documents: list[list[int]], wanted: list[int]) -> list[int]:
    """The places of the whole dataset at which `wanted` stands in one document."""
    starts = np.cumsum([0, *map(len, documents)]).tolist()
    return [
        start + at
        for start, document in zip(starts, documents, strict=False)
        for at in range(len(document) - len(wanted) + 1)
        if document[at : at + len(wanted)] == wanted
    ]


def extents(documents: list[list[int]], query: list[int]) -> dict[tuple[int, int], int]:
    """For every pair of equal tokens that the tokens before do not extend: what they begin, and how
    often.
    """
    found: dict[tuple[int, int], int] = {}
    for document in documents:
        for first in range(len(query)):
            for at in range(len(document)):
                if first and at and query[first - 1] == document[at - 1]:
                    continue
                pairs = zip([*query[first:], None], [*document[at:], None], strict=False)
                end = first + next(n for n, (mine, theirs) in enumerate(pairs) if mine != theirs or mine is None)
                if end - first >= SHORTEST:
                    found[first, end] = found.get((first, end), 0) + 1
    return found


@settings(deadline=None, max_examples=150)
@given(
    documents=st.lists(st.lists(WORD, max_size=60), min_size=1, max_size=5), query=st.lists(WORD, max_size=40),
    copied=st.integers(0, 60), kind=st.sampled_from(["<u2", "<i4"]), part=st.integers(1, 30),
)  # fmt: skip
def test_matches_and_spans_are_those_of_a_comparison_of_every_place(
    documents: list[list[int]], query: list[int], copied: int, kind: str, part: int
) -> None:
    large = 70_000 * (kind == "<i4")  # beyond 16 bits
    documents = [[word + large for word in document] for document in documents]
    # and a text across a border of documents, so that there is something to find
    query = [*(word + large for word in query), *[word for document in documents for word in document][copied:][:30]]
    with TemporaryDirectory() as folder:
        dataset = written(Path(folder) / "d", documents, None, kind)
        write_ngrams(Path(folder) / "index", Path(folder) / "d.bin", dataset.dtype, "content", part)
        found = found_by(Ngrams(Path(folder) / "index"), dataset, query)
    assert {(match.first, match.end): match.places for match in found} == extents(documents, query)
    assert all(match.place in everywhere(documents, query[match.first : match.end]) for match in found)
    inside = {at for match in found for at in range(match.first, match.end - SHORTEST + 1)}
    grams = [query[at : at + SHORTEST] for at in range(len(query) - SHORTEST + 1)]
    assert inside == {at for at, gram in enumerate(grams) if everywhere(documents, gram)}
    spans = longest_spans(found, 0, len(query))
    for span in spans:
        places = everywhere(documents, query[span.first : span.end])
        assert (span.place, span.places) == (places[0], len(places))
    longest = [max((end - first for first, end, *_ in each), default=0) for each in (spans, found)]
    assert longest[0] == longest[1] and all(before.end <= after.first for before, after in pairwise(spans))
    gaps = pairwise([0, *(edge for span in spans for edge in (span.first, span.end)), len(query)])
    between = {at for begin, end in list(gaps)[::2] for at in range(begin, end - SHORTEST + 1)}
    assert not inside & between, "what lies between spans has no 8 tokens of the dataset"


def test_an_index_is_made_once_and_again_for_other_tokens(tmp_path: Path) -> None:
    prefix, words = tmp_path / "d", list(range(40))
    dataset = written(prefix, [words[:20], words[20:]])
    for expected in ([(12, 20), (20, 28)], [(12, 28)]):
        query = words[12:28]
        found = found_by(open_ngrams(prefix, dataset.dtype, content_of(prefix)), dataset, query)
        assert [(match.first + 12, match.end + 12) for match in found] == expected
        made = (tmp_path / "d.ngrams").stat()
        open_ngrams(prefix, dataset.dtype, content_of(prefix), tmp_path / "elsewhere")
        assert (tmp_path / "elsewhere").read_bytes() == (tmp_path / "d.ngrams").read_bytes()
        open_ngrams(prefix, dataset.dtype, content_of(prefix))
        assert (tmp_path / "d.ngrams").stat() == made
        dataset = written(prefix, [[9, 9, *words]])


def test_a_damaged_index_and_one_of_an_older_version_are_made_again(tmp_path: Path) -> None:
    prefix = tmp_path / "d"
    dataset = written(prefix, [list(range(40))])
    open_ngrams(prefix, dataset.dtype, content_of(prefix))
    path = tmp_path / "d.ngrams"
    whole = path.read_bytes()
    for other in (b"", whole[:-1], b"URLGRAMS" + bytes(90)):
        path.write_bytes(other)
        open_ngrams(prefix, dataset.dtype, content_of(prefix))
        assert path.read_bytes() == whole


def test_a_build_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = tmp_path / "d"
    dataset = written(prefix, [list(range(40))])
    before = sorted(tmp_path.iterdir())

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Meter, "advance", stop)
        open_ngrams(prefix, dataset.dtype, content_of(prefix))
    assert sorted(tmp_path.iterdir()) == before
    killed = f"d.ngrams.{socket.gethostname()}-{2**22 + 1}-1.tmp"  # no process has this number
    (tmp_path / killed).write_bytes(b"of a process that was killed")
    assert found_by(open_ngrams(prefix, dataset.dtype, content_of(prefix)), dataset, list(range(5, 15)))
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "d.ngrams"])
