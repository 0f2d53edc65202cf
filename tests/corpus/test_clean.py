from pathlib import Path

import orjson
import pytest
import zstandard

from common.errors import EmptyResultError, InputError
from common.files import read_json
from common.settings import CleanSettings
from corpus.clean import clean
from corpus.text.repair import repair
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


def test_each_rule_drops_what_it_names(tmp_path: Path) -> None:
    good = prose(1)
    texts = [good, " \n", "Please enable JavaScript to view this page.", "Too short.", GERMAN]
    kept, reasons = run(tmp_path, texts)
    assert kept == [repair(good)]
    assert reasons == {"empty": 1, "javascript": 1, "short": 1, "language": 1}


def test_rules_follow_the_configuration(tmp_path: Path) -> None:
    kept, reasons = run(tmp_path, [prose(1), "Too short.", GERMAN], CleanSettings(language="", min_characters=5))
    assert len(kept) == 3 and reasons == {}
    assert run(tmp_path, [prose(1), GERMAN], CleanSettings(language="de"))[1] == {"language": 1}


def test_indentation_and_tables_are_kept_unless_white_space_is_folded(tmp_path: Path) -> None:
    page = prose(1) + "\n\n\nname     size\na.txt    1024\n\n    def f():\n\treturn 1\n"
    assert run(tmp_path, [page, " \n"])[0] == [page]
    folded = prose(1) + "\n\nname size\na.txt 1024\n\ndef f():\nreturn 1"
    assert run(tmp_path, [page], CleanSettings(fold_whitespace=True))[0] == [folded]


def test_other_fields_and_the_order_are_kept(tmp_path: Path) -> None:
    documents = [document(number, prose(number), title=f"title {number}") for number in range(5)]
    source = write_shard(tmp_path / "in.jsonl.zst", documents)
    clean([source], tmp_path / "out.jsonl.zst", CleanSettings())
    assert [(d["id"], d["title"]) for d in read_shard(tmp_path / "out.jsonl.zst")] == [
        (d["id"], d["title"]) for d in documents
    ]


def test_the_worker_count_changes_no_byte(tmp_path: Path) -> None:
    texts = [prose(number) if number % 5 else GERMAN + str(number) for number in range(80)]
    source = write_shard(tmp_path / "in.jsonl.zst", [document(n, text) for n, text in enumerate(texts)])
    for workers in (1, 2):
        clean([source], tmp_path / f"{workers}.jsonl.zst", CleanSettings(), tmp_path / f"r{workers}.zst", workers)
    assert (tmp_path / "1.jsonl.zst").read_bytes() == (tmp_path / "2.jsonl.zst").read_bytes()
    assert (tmp_path / "r1.zst").read_bytes() == (tmp_path / "r2.zst").read_bytes()


def test_real_articles_are_english_or_dropped_for_a_reason(tmp_path: Path, shared_data: Path) -> None:
    wiki = (shared_data / "text" / "wikitext2-test.txt").read_text(encoding="utf-8")
    texts = [wiki[start : start + 4000] for start in range(0, 80_000, 4000)]
    kept, reasons = run(tmp_path, texts)
    assert len(kept) == 20 and not reasons


def test_a_shard_that_ends_empty_is_an_error_with_its_reasons_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_shard(tmp_path / "in.jsonl.zst", [document(1, "short"), document(2, "")])
    with pytest.raises(EmptyResultError, match=r"none of 2 documents is left \(1 .*, 1 .*\)"):
        clean([source], tmp_path / "out.jsonl.zst", CleanSettings(), tmp_path / "rejects.jsonl.zst")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl.zst"]


def test_the_command_answers_a_truncated_shard_in_one_line(tmp_path: Path, command: Command) -> None:
    source = write_shard(tmp_path / "in.jsonl.zst", [document(n, prose(n)) for n in range(20)])
    source.write_bytes(source.read_bytes()[:-30])
    result = command("corpus.clean", "--input", source, "--output", tmp_path / "out.jsonl.zst", "--workers", 2)
    assert_one_line_error(result, "in.jsonl.zst", "truncated")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl.zst"]


def test_statistics_tell_languages_sizes_and_the_same_few_examples_of_each_reason(tmp_path: Path) -> None:
    documents = [document(n, GERMAN if n % 2 else prose(n)) for n in range(60)] + [document(99, "Too short.")]
    dumped = []
    for name, order in (("a", documents), ("b", documents[::-1])):
        source = write_shard(tmp_path / f"{name}.jsonl.zst", order)
        stats = clean([source], tmp_path / "out.jsonl.zst", CleanSettings(), tmp_path / "rejects.jsonl.zst").as_dict()
        dumped.append({key: value for key, value in stats.items() if key != "seconds"})
    assert dumped[0] == dumped[1]
    assert stats["languages"] == {"en": 30, "de": 30}
    assert stats["sizes_in"].pop("8") == 1 and sum(stats["sizes_in"].values()) == 60
    assert sum(stats["sizes_out"].values()) == 30 and min(map(int, stats["sizes_out"])) == 512
    assert [found["id"] for found in stats["examples"]["language"]] == [f"{n:016x}" for n in range(1, 20, 2)]
    assert stats["examples"]["short"][0]["finding"] == "10 characters"
    assert {found["finding"] for found in read_rejects(tmp_path / "rejects.jsonl.zst")} == {"de", "10 characters"}


def test_bad_lines_are_counted_and_located_and_cost_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [orjson.dumps(document(n, prose(n))) for n in range(20)]
    bad = [
        b"{not json",
        b"[1]",
        b'{"id": "1"}',
        b'{"id": "1", "text": 7}',
        b'{"id": "1", "text": "\\ud800 alone"}',
        b"\xff",
    ]
    source = tmp_path / "in.jsonl.zst"
    source.write_bytes(zstandard.compress(b"\n".join([*good[:10], *bad, *good[10:]]) + b"\n"))
    stats = clean([source], tmp_path / "out.jsonl.zst", CleanSettings(), max_bad_share=0.3)
    assert stats.extra["bad_lines"] == 6 and stats.documents_out == 20
    warnings = capsys.readouterr().err
    assert all(f"in.jsonl.zst:{number}: " in warnings for number in range(11, 17))
    with pytest.raises(InputError, match=r"in.jsonl.zst:11: .*6 of 26 lines are bad, more than max_bad_share"):
        clean([source], tmp_path / "no.jsonl.zst", CleanSettings())
    assert not (tmp_path / "no.jsonl.zst").exists()


def test_odd_texts_are_cleaned_like_others(tmp_path: Path) -> None:
    texts = ["\x00" * 600 + prose(1), prose(2) + "\ufdd0\ufffe", "\ud7ff" * 600, "\x1b[0m" * 200, "1 " * 600]
    kept, reasons = run(tmp_path, texts)
    assert kept == [repair(text) for text in texts[:2]] and kept[0] == repair(prose(1))
    assert reasons == {"language": 2, "empty": 1}


def test_an_empty_shard_gives_an_empty_shard_where_that_is_allowed(tmp_path: Path) -> None:
    assert run(tmp_path, []) == ([], {})


@pytest.mark.slow
def test_a_document_of_50_mb_passes(tmp_path: Path) -> None:
    page = "\n".join(prose(n, 1000) for n in range(50)) + "\n“quoted” &amp; more – é\n"
    kept, reasons = run(tmp_path, [page * (50_000_000 // len(page))])
    assert not reasons and len(kept[0]) > 49_000_000 and kept[0].endswith('"quoted" & more – é\n')


def test_explain_prints_what_every_rule_finds_and_writes_nothing(tmp_path: Path, command: Command) -> None:
    documents = [document(n, prose(n)) for n in range(30)] + [document(30, "x"), document(0, GERMAN[:300])]
    source = write_shard(tmp_path / "in.jsonl.zst", documents)
    result = command("corpus.clean", "--explain", source)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("site.example") == 20
    explained = [part.split("\n  ") for part in result.stdout.strip().split("\n0")]
    german = next(lines for lines in explained if lines[0].endswith("drop (short)"))
    assert [line.split()[:2] for line in german[2:]] == [
        ["empty", "keep"], ["javascript", "keep"], ["short", "drop:"], ["language", "drop:"],
    ]  # fmt: skip
    assert german[-1].endswith("de")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl.zst"]
    assert_one_line_error(command("corpus.clean", "--input", source), "--explain")
    assert_one_line_error(command("corpus.clean", "--explain", tmp_path / "no.zst"), "no such file")


def test_the_command_writes_its_statistics(tmp_path: Path, command: Command) -> None:
    source = write_shard(tmp_path / "in.jsonl.zst", [document(1, prose(1))])
    (tmp_path / "config.yaml").write_text("run: x\nurls: [x]\nclean: {gopher: {enabled: true, max_words: 100}}\n")
    arguments = ("--output", tmp_path / "out.zst", "--stats", tmp_path / "s.json", "--config", tmp_path / "config.yaml")
    result = command("corpus.clean", "--input", source, "--allow-empty", *arguments)
    assert result.returncode == 0, result.stderr
    assert read_json(tmp_path / "s.json")["reasons"] == {"gopher_words": 1}
