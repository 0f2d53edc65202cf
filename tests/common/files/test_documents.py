import json
from pathlib import Path

import orjson
import pytest

from common.errors import InputError
from common.files import BadLines, document_writer, read_documents, read_lines
from tests.helpers import document, write_shard


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{broken", "not JSON at column 2: unexpected character, expected a string key, in '{broken'"),
        (b'{"id": "a", "text": "\xff"}', "not UTF-8 at byte 22"),
        (b'{"id": "a", "text": "", "x": NaN, y}', "not JSON at column 30"),
        (b"[1]", "not a JSON object"),
        (b'{"id": "a", "text": 3}', "'text'"),
        (b'{"text": "a"}', "'id'"),
        (b'{"id": "a", "text": "", "x": ' + b"[" * 254 + b"]" * 254 + b"}", "100 deep"),
        (b'{"id": "a", "text": "", "x": [1e300, {"y": -9223372036854775809}]}', "64 bits"),
        (b'{"id": "a", "text": "' + b"." * (4 << 20) + b'"}', "1,000,000 bytes"),
    ],
)
def test_a_bad_line_is_located_and_counted_and_a_larger_share_than_allowed_fails(
    tmp_path: Path, line: bytes, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.files.documents.LONGEST_LINE", 1_000_000)
    path = tmp_path / "a.jsonl"
    good = document(1, "x", numbers=[-(2**63), 2**64 - 1, 1e19, -1e300], nested=[[[{}]]])
    path.write_bytes(orjson.dumps(good) + b"\n" + line + b"\n" + b"".join(orjson.dumps(good) + b"\n" for _ in "ab"))
    for share in (0.25, 0.24):
        bad = BadLines(max_share=share)
        assert list(read_documents(path, bad)) == [good] * 3
        assert (bad.bad, bad.lines) == (1, 4)
        assert bad.first.startswith(f"{path}:2: ") and problem in bad.first
        if share == 0.25:
            bad.check()
    with pytest.raises(InputError, match=r"a\.jsonl:2: .*1 of 4"):
        bad.check()


def test_constants_that_json_lacks_are_null(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = document(1, "NaN", scores=[float("nan"), {"x": -float("inf")}, float("inf"), 2**64 - 1, 1.5])
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "too_large": 2**64}))
    bad = BadLines(max_share=1)
    assert list(read_documents(path, bad)) == [{**row, "scores": [None, {"x": None}, None, 2**64 - 1, 1.5]}]
    assert "64 bits" in bad.first


def test_a_document_that_was_dropped_once_is_never_read_again(tmp_path: Path) -> None:
    text = 'He wrote {"dropped_by": "clean"} on a line: "dropped_by":'
    shard = write_shard(tmp_path / "a.jsonl", [document(1, text, nested={"dropped_by": 1}), document(2, "kept")])
    assert len(list(read_documents(shard))) == 2
    with document_writer(tmp_path / "rejects.jsonl", "clean") as reject:
        reject({**document(3, "dropped"), "reason": "short"})
    (line,) = read_lines(tmp_path / "rejects.jsonl")
    assert orjson.loads(line) == {"dropped_by": "clean", **document(3, "dropped"), "reason": "short"}
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_bytes(shard.read_bytes() + line)
    for reader in (lambda: read_documents(mixed), lambda: read_documents(mixed, BadLines(1.0))):
        with pytest.raises(InputError, match=r"mixed\.jsonl:3"):
            list(reader())
