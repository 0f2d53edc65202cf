"""The checksum that identifies a dataset's tokens."""

from pathlib import Path

import numpy as np
import pytest

from corpus.index import IndexWriter, Meta, content, content_of


@pytest.mark.parametrize("meta", [Meta(257, 256), None], ids=["ours", "another tool's"])
@pytest.mark.parametrize("large", [False, True])
def test_other_tokens_of_the_same_lengths_have_another_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meta: Meta | None, large: bool
) -> None:
    if large:
        for name, value in (("_SMALL", 1000), ("_PIECE", 64), ("_PIECES", 128)):
            monkeypatch.setattr(content, name, value)
    found = []
    for number in range(3):
        tokens = np.arange(4000) % 251
        tokens[1234] += number // 2  # the third differs
        with IndexWriter(tmp_path / str(number), np.uint16, meta) as writer:
            writer.add_document(tokens)
        found.append(content_of(tmp_path / str(number)))
    assert found[0] == found[1] != found[2]
    assert found[0].partition(":")[0] == ("sampled" if large and meta is None else "xxh3")
