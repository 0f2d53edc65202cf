import bz2
import gzip
import io
import json
import lzma
import resource
from pathlib import Path

import orjson
import pytest
import zstandard

from common.errors import EmptyResultError, InputError
from common.files import fingerprint, read_lines
from common.settings import BlacklistSettings
from corpus import blacklist as module
from corpus.blacklist import blacklist, main
from corpus.urls.public_suffix import registered_domain
from corpus.urls.url import parse_url
from tests.conftest import Command
from tests.helpers import assert_one_line_error

URLS = b"""
# a comment
http://example.org/first
http://example.org/picture.jpg
https://www.example.org/first?utm_source=list
http://other.example/second
not a url
"""


def run(folder: Path, data: bytes, name: str = "urls.txt", settings: BlacklistSettings | None = None) -> list[str]:
    (folder / name).write_bytes(data)
    blacklist([folder / name], [folder / "out.txt"], settings or BlacklistSettings())
    return (folder / "out.txt").read_text().splitlines()


def test_kept_urls_come_out_in_input_order_and_rejects_name_their_reason(tmp_path: Path) -> None:
    (tmp_path / "urls.txt").write_bytes(URLS)
    stats = blacklist([tmp_path / "urls.txt"], [tmp_path / "out.txt"], BlacklistSettings(), tmp_path / "rejects.jsonl")
    assert (tmp_path / "out.txt").read_text() == "http://example.org/first\nhttp://other.example/second\n"
    rejects = [orjson.loads(line) for line in read_lines(tmp_path / "rejects.jsonl")]
    assert [reject["reason"] for reject in rejects] == ["extension", "duplicate", "malformed"]
    assert (stats.documents_in, stats.documents_out) == (5, 2)
    assert dict(stats.reasons) == {"extension": 1, "duplicate": 1, "malformed": 1}
    assert stats.extra["inputs"] == {str(tmp_path / "urls.txt"): fingerprint(tmp_path / "urls.txt")}


@pytest.mark.parametrize("suffix", ["txt", "gz", "bz2", "xz", "zst"])
def test_lists_are_read_in_every_compression(tmp_path: Path, suffix: str) -> None:
    pack = {"txt": bytes, "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.compress}
    assert len(run(tmp_path, pack[suffix](URLS), f"urls.{suffix}")) == 2


def test_pushshift_submissions_are_filtered_by_score_age_and_kind(tmp_path: Path) -> None:
    entries = [
        {"url": "http://example.org/good", "score": 3, "over_18": False, "is_self": False},
        {"url": "http://example.org/low", "score": 2},
        {"url": "http://example.org/adult", "score": 9, "over_18": True},
        {"url": "http://example.org/self", "score": 9, "is_self": True},
        {"no_url": 1},
    ]
    data = b"".join(orjson.dumps(entry) + b"\n" for entry in entries) + b"{broken\n"
    assert run(tmp_path, data) == ["http://example.org/good"]
    everything = BlacklistSettings(min_score=0, over_18=True, self_posts=True)
    assert len(run(tmp_path, data, settings=everything)) == 4


def test_real_submissions_give_the_same_shards_every_time(tmp_path: Path, shared_data: Path) -> None:
    source = shared_data / "urls" / "submissions.jsonl"
    for name in ("one", "two"):
        outputs = [tmp_path / name / f"{shard:04d}.txt" for shard in range(5)]
        stats = blacklist([source], outputs, BlacklistSettings())
    assert stats.documents_in == 1182
    assert stats.documents_in == stats.documents_out + stats.reasons.total()
    assert stats.reasons["score"] == sum(json.loads(line)["score"] < 3 for line in source.read_text().splitlines())
    for shard in range(5):
        name = f"{shard:04d}.txt"
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_registered_domain_lives_in_one_shard_and_shards_keep_the_order(tmp_path: Path) -> None:
    urls = [f"http://{sub}.site{number % 7}.example/{number}" for number in range(200) for sub in ("a", "b")]
    (tmp_path / "urls.txt").write_text("\n".join(urls))
    outputs = [tmp_path / f"{shard}.txt" for shard in range(4)]
    blacklist([tmp_path / "urls.txt"], outputs, BlacklistSettings())
    shards = [path.read_text().splitlines() for path in outputs]
    assert sorted(url for shard in shards for url in shard) == sorted(urls)
    homes: dict[str, set[int]] = {}
    for number, shard in enumerate(shards):
        assert shard == [url for url in urls if url in set(shard)]
        for url in shard:
            homes.setdefault(registered_domain(parse_url(url).host), set()).add(number)
    assert len(homes) == 7 and all(len(home) == 1 for home in homes.values())


def test_two_thousand_shards_need_no_two_thousand_open_files(tmp_path: Path) -> None:
    (tmp_path / "urls.txt").write_text("".join(f"http://site{number}.example/page\n" for number in range(3000)))
    outputs = [tmp_path / "shards" / f"{shard:04d}.txt" for shard in range(2000)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert blacklist([tmp_path / "urls.txt"], outputs, BlacklistSettings()).documents_out == 3000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sum(len(path.read_text().splitlines()) for path in outputs) == 3000


def test_bytes_do_not_depend_on_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.files.reading._CHUNK", 5_000)  # many blocks
    urls = [f"http://site{number % 91}.example/{number % 2000}?utm_source=x{number}" for number in range(4000)]
    (tmp_path / "urls.txt").write_text("\n".join(urls))
    written = []
    for workers in (1, 2):
        outputs = [tmp_path / f"{workers}-{shard}.txt" for shard in range(3)]
        rejects = tmp_path / f"{workers}.jsonl"
        blacklist([tmp_path / "urls.txt"], outputs, BlacklistSettings(), rejects, workers)
        written.append([path.read_bytes() for path in (*outputs, rejects)])
    assert written[0] == written[1]


def test_urls_flushed_in_pieces_are_all_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FLUSH", 3)
    urls = [f"http://example.org/{number}" for number in range(10)]
    assert run(tmp_path, "\n".join(urls).encode()) == urls


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ((), ["good"]),
        (("--min-score", "1"), ["good", "low"]),
        (("--over-18", "--self-posts"), ["good", "adult", "self"]),
    ],
)
def test_options_say_which_submissions_are_taken(tmp_path: Path, options: tuple[str, ...], kept: list[str]) -> None:
    entries = [
        {"url": "http://a.example/good", "score": 3},
        {"url": "http://a.example/low", "score": 1},
        {"url": "http://a.example/adult", "score": 9, "over_18": True},
        {"url": "http://a.example/self", "score": 9, "is_self": True},
    ]
    (tmp_path / "RS.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    assert main(["--input", str(tmp_path / "RS.jsonl"), "--output", str(tmp_path / "out.txt"), *options]) == 0
    assert (tmp_path / "out.txt").read_text().split() == [f"http://a.example/{name}" for name in kept]


def test_stdin_is_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"http://example.org/page\n")))
    assert main(["--input", "-", "--output", str(tmp_path / "out.txt")]) == 0
    assert "1 of 1 documents kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "error"), [(b"", InputError), (b"# nothing\n\n", InputError), (b"ftp://a.org/x\n", EmptyResultError)]
)
def test_a_list_without_usable_urls_is_an_error_and_leaves_nothing(
    tmp_path: Path, data: bytes, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"urls\.txt"):
        run(tmp_path, data)
    assert [path.name for path in tmp_path.iterdir()] == ["urls.txt"]


def test_the_command_answers_bad_input_in_one_line(tmp_path: Path, command: Command) -> None:
    missing = command("corpus.blacklist", "--input", tmp_path / "none.txt", "--output", tmp_path / "out.txt")
    assert_one_line_error(missing, "none.txt", "no such file or folder")
    (tmp_path / "config.yaml").write_text("run: x\nurls: [a]\nblaklist: {}\n")
    wrong = command("corpus.blacklist", "--input", "-", "--output", "x", "--config", tmp_path / "config.yaml")
    assert_one_line_error(wrong, "config.yaml", "'blaklist'", "'blacklist'")
