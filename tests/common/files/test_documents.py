from pathlib import Path

import orjson
import pytest

from common.errors import InputError
from common.files import BadLines, read_documents, read_lines, reject_writer, shard_paths, unmarked_blocks
from tests.helpers import document, write_shard


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{broken", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"id": "a"}', "no string under 'text'"),
        (b'{"id": "a", "text": 3}', "no string under 'text'"),
        (b'{"text": "a"}', "no string under 'id'"),
        (b'{"id": "a", "text": "\\ud800"}', "not JSON"),
        (b'{"id": "a", "text": "", "x": ' + b"[" * 254 + b"]" * 254 + b"}", "nested more than 100 deep"),
        (b'{"id": "a", "text": "", "x": [1e300, {"y": -9223372036854775809}]}', "an integer beyond 64 bits"),
        (b'{"id": "a", "text": "' + b"." * (4 << 20) + b'"}', "longer than 1,000,000 bytes"),
    ],
)
def test_a_bad_line_is_located_and_counted(
    tmp_path: Path, line: bytes, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.files.documents.LONGEST_LINE", 1_000_000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(orjson.dumps(document(1, "x")) + b"\n" + line + b"\n" + orjson.dumps(document(2, "y")) + b"\n")
    bad = BadLines(max_share=0.5)
    assert [found["text"] for found in read_documents(path, bad)] == ["x", "y"]
    assert (bad.bad, bad.lines) == (1, 3)
    assert bad.first.startswith(f"{path}:2: ") and problem in bad.first
    bad.check()
    with pytest.raises(InputError, match="1 of 3 lines are bad"):
        strict = BadLines(max_share=0.1)
        list(read_documents(path, strict))
        strict.check()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"One line.\nAnother, of 20.\n", "text, not JSON lines; python -m corpus.ingest --format text reads it"),
        (b'"id","text"\r\n1,"one"\r\n', "a table"),
        (b'[{"id": "a", "text": "x"}]', "a JSON array, not JSON lines"),
        (b"WARC/1.0\r\n", "WARC; python -m corpus.scrape --warc"),
    ],
)
def test_a_file_without_json_lines_is_one_error(tmp_path: Path, data: bytes, problem: str) -> None:
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(InputError, match=f"a: {problem}"):
        list(read_documents(tmp_path / "a", BadLines(1.0)))


def test_more_shards_than_four_digits_name_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="choose at most 100,000"):
        shard_paths(tmp_path, 99_999_999, ".txt")


def test_a_document_is_read_with_every_number_it_can_be_written_with(tmp_path: Path) -> None:
    found = document(1, "x", numbers=[-(2**63), 2**64 - 1, 1e19, -1e300], nested=[[[{}]]])
    (tmp_path / "a.jsonl").write_bytes(orjson.dumps(found))
    assert list(read_documents(tmp_path / "a.jsonl")) == [found]


def test_a_document_that_was_dropped_once_is_never_read_again(tmp_path: Path) -> None:
    shard, path = tmp_path / "a.jsonl", tmp_path / "mixed.jsonl"
    write_shard(shard, [document(1, "kept"), document(2, "kept")])
    with reject_writer(tmp_path / "rejects.jsonl", "clean") as reject:
        reject({**document(3, "dropped"), "reason": "short"})
    (line,) = read_lines(tmp_path / "rejects.jsonl")
    assert orjson.loads(line) == {"dropped_by": "clean", **document(3, "dropped"), "reason": "short"}
    path.write_bytes(shard.read_bytes() + line)
    for bad in (None, BadLines(1.0)):
        with pytest.raises(InputError, match=r"mixed\.jsonl:3: dropped by the step clean: .* name the step's shards"):
            list(read_documents(path, bad))
    with pytest.raises(InputError, match=r"mixed\.jsonl:3: dropped by the step clean"):
        list(unmarked_blocks(path))


def test_text_that_speaks_of_the_mark_is_text(tmp_path: Path) -> None:
    text = 'He wrote {"dropped_by": "clean"} on a line: "dropped_by":'
    path = write_shard(tmp_path / "a.jsonl", [document(1, text, nested={"dropped_by": 1})])
    assert [found["text"] for found in read_documents(path)] == [text]
    assert b"".join(unmarked_blocks(path)) == path.read_bytes()
