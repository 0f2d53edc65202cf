import gzip
from pathlib import Path

import pytest
from pydantic import ValidationError

from common.errors import EncodingError, InputError
from common.settings import SourceSettings
from tests.corpus.test_ingest import take

LINES = '{"text": "Schöne Grüße", "n": 1}\r\n{"text": "Zweite – Zeile"}\r\n'


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-8", "utf-8-sig", "cp1252", "utf-32"])
def test_every_encoding_gives_the_same_documents(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES.encode(encoding)))
    (tmp_path / "b.txt").write_bytes("Größe\r\n".encode(encoding))
    (tmp_path / "c.csv").write_bytes("text;n\r\nGröße;1\r\n".encode(encoding))
    paths = [tmp_path / name for name in ("a.jsonl.gz", "b.txt", "c.csv")]
    documents = take(tmp_path, *paths, encoding=encoding)
    assert [one["text"] for one in documents] == ["Schöne Grüße", "Zweite – Zeile", "Größe\r\n", "Größe"]
    if encoding == "utf-16":  # its mark tells it
        assert take(tmp_path, *paths) == documents


def test_a_wrong_encoding_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"text\ncaf\xe9\n")
    with pytest.raises(EncodingError, match=r"a\.csv: not UTF-8 \(.*; set encoding"):
        take(tmp_path, path)
    path.write_bytes(b"text\ncaf\x81\n")
    with pytest.raises(EncodingError, match=r"a\.csv: not cp1252 \("):
        take(tmp_path, path, encoding="cp1252")
    for name in ("utf-9", "base64"):
        with pytest.raises(ValidationError, match="is not an encoding"):
            SourceSettings(path="", encoding=name)


def test_a_file_of_json_lines_is_refused_at_once_if_it_begins_with_ten_bad_ones(tmp_path: Path) -> None:
    path, good, bad = tmp_path / "a.jsonl", b'{"text": "x"}\n', b'{"content": "x"}\n\n'
    path.write_bytes(bad * 9 + good + bad * 20)
    assert len(take(tmp_path, path, max_bad_share=0.99)) == 1
    path.write_bytes(bad * 10 + good * 90)
    message = (
        r"a\.jsonl:19: no string under 'text', but content; set text_key; none of the first 10 lines is a document"
    )
    with pytest.raises(InputError, match=message):
        take(tmp_path, path, max_bad_share=0.99)


def test_cells_may_hold_line_ends_quotes_and_megabytes(tmp_path: Path) -> None:
    long = "x, " * 400_000
    rows = ["url,text,n", 'http://a.example/,"One\r\nand ""two"", see",7', f'"","{long}",', "", "a,b", ",only text,"]
    (tmp_path / "a.csv").write_bytes(("\ufeff" + "\r\n".join(rows)).encode())
    documents = take(tmp_path, tmp_path / "a.csv", max_bad_share=0.5, skip_keys=["n"])
    assert [one["text"] for one in documents] == ['One\r\nand "two", see', long, "only text"]
    assert documents[0]["url"] == "http://a.example/" and "meta" not in documents[0]
    with pytest.raises(InputError, match=r"a\.csv:6: 2 cells, but 3 in the header; 1 of 4 lines"):
        take(tmp_path, tmp_path / "a.csv")
    with pytest.raises(InputError, match=r"a\.csv: no column 'body', but url, text, n; set text_key$"):
        take(tmp_path, tmp_path / "a.csv", text_key="body")
    (tmp_path / "a.tsv").write_text('text\tn\nfine\t1\n"never closed\t2\n')
    with pytest.raises(InputError, match=r"a\.tsv:3: not CSV \(.*repair its quotes"):
        take(tmp_path, tmp_path / "a.tsv")


def test_glob_chooses_files_of_any_name_below_a_folder(tmp_path: Path) -> None:
    for name in ("in [1]/a.md", "in [1]/deep/b.rst", "in [1]/deep/c.MD", "in [1]/deep/image.png", "d.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    documents = take(tmp_path / "out", tmp_path / "in [1]", glob=["**/*.md", "**/*.rst", "deep/b.*"], format="text")
    assert [one["text"] for one in documents] == ["in [1]/a.md", "in [1]/deep/b.rst"]
    with pytest.raises(InputError, match=r"\*\.html: no such file"):
        take(tmp_path / "out", tmp_path / "in [1]", glob=["*.html"], format="text")
