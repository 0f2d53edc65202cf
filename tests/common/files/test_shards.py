import gzip
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import orjson
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InputError
from common.files import BadLines, Document, Frames, lines_at, located_documents, read_blocks, sharded_writer
from common.files.shards import FRAME
from tests.conftest import ROOT
from tests.helpers import document, prose, write_shard


@cache
def documents() -> list[Document]:
    return [document(number, prose(number, 100 + 300 * (number % 7)) + "é\r") for number in range(600)]


SIZES = st.lists(st.integers(0, 1500), max_size=8)
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".zst": zstandard.compress,
    ".gz": gzip.compress,
    "": bytes,
}


def located(path: Path) -> tuple[Frames, list[tuple[int, int]]]:
    frames: Frames = []
    return frames, [(position, length) for position, length, _ in located_documents(path, frames=frames)]


def test_a_shard_has_frames_of_whole_lines_that_any_reader_takes_for_one_text(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.jsonl.zst", documents())
    frames, _ = located(path)
    text, data = b"".join(read_blocks(path)), path.read_bytes()
    assert len(frames) > 2 and frames[0] == (0, 0)
    for (_, before), (offset, start) in pairwise(frames):
        assert FRAME <= start - before < FRAME + max(map(len, text.splitlines()))
        assert text[start - 1 : start] == b"\n" and data[offset:].startswith(zstandard.FRAME_HEADER)
    with path.open("rb") as file:
        assert zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read() == text


def test_a_writer_of_shards_holds_the_bytes_that_it_counts(tmp_path: Path) -> None:
    code = f"""if True:
        from pathlib import Path
        from common.files import sharded_writer
        def peak():  # not getrusage: that of a child begins with its parent's
            return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
        before = peak()
        with sharded_writer([Path({str(tmp_path)!r}) / "a.jsonl.zst"]) as write:
            for number in range(60_000):
                write(0, {{"id": str(number), "text": "A title."}})
        print(peak() - before)"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(result.stdout) < 40_000, "3 MB of lines; orjson allocates 1 KB and more for each"


def test_threads_change_no_byte_of_several_shards_and_one_batch_has_several_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.files.shards._HELD", 1 << 20)
    written = []
    for threads in (1, 3):
        paths = [tmp_path / f"{threads}/{shard}.jsonl.zst" for shard in range(3)]
        with sharded_writer(paths, threads) as write:
            for number, found in enumerate(documents()):
                write(number % 50 == 0, found)  # nothing for the third
        written.append([path.read_bytes() for path in paths])
    assert written[0] == written[1]
    frames, lines = located(paths[0])
    assert len(frames) > len(b"".join(lines_at(paths[0], frames, lines))) / (1 << 20) * 1.5
    assert located(paths[2])[1] == []


@settings(max_examples=40)
@given(st.data())
def test_lines_are_found_again_in_any_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Frames that end inside a line, empty ones, a byte-order mark, Windows line ends and lines
    that are too long.
    """
    folder = tmp_path_factory.mktemp("lines")
    lines = [orjson.dumps(document(number, "x" * size)) for number, size in enumerate(data.draw(SIZES))]
    lines.insert(len(lines) // 2, b'{"text": "' + b"." * 3000 + b'"}')
    text = data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + data.draw(st.sampled_from([b"\n", b"\r\n"])).join(lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    parts = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for suffix, pack in PACK.items():
        path = folder / f"a.jsonl{suffix}"
        path.write_bytes(b"".join(map(pack, parts)))
        frames: Frames = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("common.files.documents.LONGEST_LINE", 2000)
            patch.setattr("common.files.reading._CHUNK", 1000)
            every = list(located_documents(path, BadLines(1), frames))
        chosen = sorted(data.draw(st.lists(st.sampled_from(every)))) if every else []
        read = list(lines_at(path, frames, [(position, length) for position, length, _ in chosen]))
        assert [orjson.loads(line) for line in read] == [found for _, _, found in chosen]


def test_one_line_is_read_from_its_frame_alone_and_damage_is_named(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.jsonl.zst", documents())
    frames, lines = located(path)
    data = bytearray(path.read_bytes())
    data[: frames[1][0]] = bytes(frames[1][0])
    path.write_bytes(data)  # the first frame is gone
    assert orjson.loads(next(lines_at(path, frames, lines[-1:]))) == documents()[-1]
    with pytest.raises(InputError, match=r"a\.jsonl\.zst: damaged"):
        next(lines_at(path, frames, lines[:1]))
    with pytest.raises(InputError, match=r"a\.jsonl\.zst: shorter"):
        list(lines_at(path, frames, [(lines[-1][0], 1 << 30)]))
