from pathlib import Path

import pytest

from common.files import read_json
from common.settings import CleanSettings
from corpus.clean import clean
from corpus.text.repair import repair
from tests.common.commands import here
from tests.conftest import Command
from tests.helpers import assert_one_line_error, document, prose, read_rejects, read_shard, write_shard

GERMAN = (
    "Der Hund lief durch den Wald und suchte nach seinem Herrn, der am Morgen das Haus verlassen hatte. "
    "Es war ein kalter Tag im November, und die Blätter lagen schon lange auf dem Boden. "
) * 5


def run(folder: Path, texts: list[str], settings: CleanSettings | None = None) -> tuple[list[str], dict[str, int]]:
    source = write_shard(folder / "in.jsonl.zst", [document(n, text) for n, text in enumerate(texts)])
    stats = clean([source], folder / "out.jsonl.zst", settings or CleanSettings(), allow_empty=True)
    return [found["text"] for found in read_shard(folder / "out.jsonl.zst")], dict(stats.reasons)


def test_each_rule_drops_what_it_names_as_the_configuration_says(tmp_path: Path) -> None:
    texts = [prose(1), " \n", "Please enable JavaScript to view this page.", "Too short.", GERMAN]
    kept, reasons = run(tmp_path, texts)
    assert kept == [repair(prose(1))]
    assert reasons == {"empty": 1, "javascript": 1, "short": 1, "language": 1}
    kept, reasons = run(tmp_path, [prose(1), "Too short.", GERMAN], CleanSettings(language="", min_characters=5))
    assert len(kept) == 3 and reasons == {}
    assert run(tmp_path, [prose(1), GERMAN], CleanSettings(language="de"))[1] == {"language": 1}


def test_texts_are_repaired_and_white_space_is_folded_where_asked(tmp_path: Path) -> None:
    page = prose(1) + "\n\n\nname     size\na.txt    1024\n\n    def f():\n\treturn 1\n"
    odd = ["\x00" * 600 + prose(1), prose(2) + "\ufdd0\ufffe"]
    kept, reasons = run(tmp_path, [page, *odd, "\ud7ff" * 600, "\x1b[0m" * 200, "1 " * 600])
    assert kept == [page, prose(1), repair(odd[1])] and reasons == {"language": 2, "empty": 1}
    folded = prose(1) + "\n\nname size\na.txt 1024\n\ndef f():\nreturn 1"
    assert run(tmp_path, [page], CleanSettings(fold_whitespace=True))[0] == [folded]


def test_the_worker_count_changes_no_byte_and_other_fields_and_the_order_are_kept(tmp_path: Path) -> None:
    documents = [document(n, prose(n) if n % 5 else f"{GERMAN}{n}", title=f"title {n}") for n in range(80)]
    source = write_shard(tmp_path / "in.jsonl.zst", documents)
    for workers in (1, 2):
        clean([source], tmp_path / f"{workers}.zst", CleanSettings(), tmp_path / f"r{workers}.zst", workers)
    assert (tmp_path / "1.zst").read_bytes() == (tmp_path / "2.zst").read_bytes()
    assert (tmp_path / "r1.zst").read_bytes() == (tmp_path / "r2.zst").read_bytes()
    expected = [(f"{n:016x}", f"title {n}") for n in range(80) if n % 5]
    assert [(found["id"], found["title"]) for found in read_shard(tmp_path / "1.zst")] == expected


def test_a_truncated_shard_is_one_line_and_leaves_nothing(tmp_path: Path, command: Command) -> None:
    source = write_shard(tmp_path / "in.jsonl.zst", [document(n, prose(n)) for n in range(20)])
    source.write_bytes(source.read_bytes()[:-30])
    result = command("corpus.clean", "--input", source, "--output", tmp_path / "out.jsonl.zst", "--workers", 2)
    assert_one_line_error(result, "in.jsonl.zst")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl.zst"]


def test_statistics_tell_languages_sizes_and_the_same_few_examples_of_each_reason(tmp_path: Path) -> None:
    documents = [document(n, GERMAN if n % 2 else prose(n)) for n in range(60)] + [document(99, "Too short.")]
    dumped = []
    for name, order in (("a", documents), ("b", documents[::-1])):
        source = write_shard(tmp_path / f"{name}.jsonl.zst", order)
        stats = clean([source], tmp_path / "out.jsonl.zst", CleanSettings(), tmp_path / "rejects.jsonl.zst").as_dict()
        dumped.append(stats | {"seconds": 0})
    assert dumped[0] == dumped[1]
    assert stats["languages"] == {"en": 30, "de": 30}
    assert stats["sizes_in"].pop("8") == 1 and sum(stats["sizes_in"].values()) == 60
    assert sum(stats["sizes_out"].values()) == 30 and min(map(int, stats["sizes_out"])) == 512
    assert [found["id"] for found in stats["examples"]["language"]] == [f"{n:016x}" for n in range(1, 20, 2)]
    assert {found["finding"] for found in read_rejects(tmp_path / "rejects.jsonl.zst")} == {"de", "10 characters"}


def test_explain_prints_what_every_rule_finds_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = [document(n, prose(n)) for n in range(30)] + [document(30, "x"), document(0, GERMAN[:300])]
    source = write_shard(tmp_path / "in.jsonl.zst", documents)
    result = here(capsys, "corpus.clean", "--explain", source)
    assert result.returncode == 0 and result.stdout.count("site.example") == 20
    explained = [part.split("\n  ") for part in result.stdout.strip().split("\n0")]
    german = next(lines for lines in explained if lines[0].endswith("drop (short)"))
    verdicts = [line.split()[:2] for line in german[2:]]
    assert verdicts == [["empty", "keep"], ["javascript", "keep"], ["short", "drop:"], ["language", "drop:"]]
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl.zst"]
    assert_one_line_error(here(capsys, "corpus.clean", "--input", source), "--explain")


def test_the_command_writes_its_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_shard(tmp_path / "in.jsonl.zst", [document(1, prose(1))])
    (tmp_path / "c.yaml").write_text("run: x\nurls: [x]\nclean: {gopher: {enabled: true, max_words: 100}}\n")
    options = ("--output", tmp_path / "out.zst", "--stats", tmp_path / "s.json", "--config", tmp_path / "c.yaml")
    assert_one_line_error(here(capsys, "corpus.clean", "--input", source, *options), "in.jsonl.zst")
    assert not (tmp_path / "out.zst").exists()
    assert here(capsys, "corpus.clean", "--input", source, "--allow-empty", *options).returncode == 0
    assert read_json(tmp_path / "s.json")["reasons"] == {"gopher_words": 1} and not read_shard(tmp_path / "out.zst")
