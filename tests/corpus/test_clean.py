from pathlib import Path

import pytest

from common.errors import EmptyResultError
from common.settings import CleanSettings
from corpus.clean import clean, language_of, repair
from tests.conftest import Command
from tests.helpers import assert_one_line_error, document, prose, read_shard, write_shard

GERMAN = (
    "Der Hund lief durch den Wald und suchte nach seinem Herrn, der am Morgen das Haus verlassen hatte. "
    "Es war ein kalter Tag im November, und die Blätter lagen schon lange auf dem Boden. "
) * 5


def run(folder: Path, texts: list[str], settings: CleanSettings | None = None) -> tuple[list[str], dict[str, int]]:
    source = write_shard(folder / "in.jsonl.zst", [document(n, text) for n, text in enumerate(texts)])
    stats = clean([source], folder / "out.jsonl.zst", settings or CleanSettings(), allow_empty=True)
    return [found["text"] for found in read_shard(folder / "out.jsonl.zst")], dict(stats.reasons)


def test_mojibake_entities_and_control_characters_are_repaired() -> None:
    assert repair("schÃ¶n &amp; gut") == "schön & gut"
    assert repair("a\x00b") == "ab"
    assert repair("  one \t two \n\n\n\n  three  ") == "one two\n\nthree"


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


def test_language_answers_are_repeatable_and_never_fail() -> None:
    assert language_of("12345 67890 !!!") == ""
    assert len({language_of("Das ist ja nice, really") for _ in range(20)}) == 1


def test_real_articles_are_english_or_dropped_for_a_reason(tmp_path: Path, shared_data: Path) -> None:
    wiki = (shared_data / "text" / "wikitext2-test.txt").read_text(encoding="utf-8")
    texts = [wiki[start : start + 4000] for start in range(0, 80_000, 4000)]
    kept, reasons = run(tmp_path, texts)
    assert len(kept) == 20 and not reasons


def test_a_shard_that_ends_empty_is_an_error_with_its_reasons_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_shard(tmp_path / "in.jsonl.zst", [document(1, "short"), document(2, "")])
    with pytest.raises(EmptyResultError, match=r"none of 2 documents is left after cleaning \(1 .*, 1 .*\)"):
        clean([source], tmp_path / "out.jsonl.zst", CleanSettings(), tmp_path / "rejects.jsonl.zst")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl.zst"]


def test_the_command_answers_a_truncated_shard_in_one_line(tmp_path: Path, command: Command) -> None:
    source = write_shard(tmp_path / "in.jsonl.zst", [document(n, prose(n)) for n in range(20)])
    source.write_bytes(source.read_bytes()[:-30])
    result = command("corpus.clean", "--input", source, "--output", tmp_path / "out.jsonl.zst", "--workers", 2)
    assert_one_line_error(result, "in.jsonl.zst", "truncated")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl.zst"]
