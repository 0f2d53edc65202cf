from pathlib import Path

from common.files import read_json, write_json
from common.settings import DecontaminateSettings
from corpus.decontaminate import count, cut
from tests.conftest import Command
from tests.helpers import assert_one_line_error, called, document, prose, read_shard, write_shard

ITEM = "Which river did the old surveyor cross before he finally reached his camp in the northern valley"
FILLER = "This sentence has nothing to do with it at all. "


def decontaminate(folder: Path, texts: list[str], *items: str, workers: int = 1) -> tuple[list[str], dict[str, object]]:
    """What is left of the texts, and the statistics; `counts.json` and `rejects.zst` lie beside
    `in.zst`.
    """
    (folder / "set.txt").write_text("\n".join(items or [ITEM]))
    settings = DecontaminateSettings(files=[str(folder / "set.txt")])
    shard = write_shard(folder / "in.zst", [document(n, text) for n, text in enumerate(texts)])
    write_json(folder / "counts.json", count([shard], settings, workers=workers))
    output, rejects = folder / "out.zst", folder / "rejects.zst"
    options = {"rejects": rejects, "workers": workers, "allow_empty": True}
    stats = cut([shard], [folder / "counts.json"], output, settings, **options)  # type: ignore[arg-type]
    return [found["text"] for found in read_shard(output)], stats.as_dict()


def test_a_match_is_cut_with_200_characters_on_each_side_to_the_end_of_a_sentence(tmp_path: Path) -> None:
    before, after = "Before it. " * 50, "After it! " * 50
    written = ITEM.upper().replace("VE", "V\u00adE")  # with a soft hyphen
    (kept,), stats = decontaminate(tmp_path, [f"{before}{written}? {after}"])
    first, second = kept.split("\n\n")
    assert before.startswith(first) and first.endswith("it.") and 200 <= len(before) - len(first) < 215
    assert after.strip().endswith(second) and second.startswith("After") and 200 <= len(after) - len(second) < 215
    sets = {str(tmp_path / "set.txt"): {"ngrams": 5, "ignored": 0, "hits": 5, "documents": 1}}
    assert stats["evaluation_sets"] == sets


def test_n_grams_seen_ten_times_in_the_corpus_stay(tmp_path: Path) -> None:
    text = f"{FILLER * 20}{ITEM}. {FILLER * 20}"
    kept, stats = decontaminate(tmp_path, [text] * 10)
    assert kept == [text] * 10
    assert stats["evaluation_sets"][str(tmp_path / "set.txt")]["ignored"] == 5  # type: ignore[index]
    kept, _ = decontaminate(tmp_path, [text] * 9)
    assert len(kept) == 9 and all(ITEM not in found for found in kept)


def test_a_document_in_more_than_ten_pieces_is_dropped(tmp_path: Path) -> None:
    riddles = [f"a riddle of eight words or more is number {n}" for n in range(10)]
    texts = ["".join(f"{FILLER * 20}{riddle}. " for riddle in riddles[-n:]) + FILLER * 20 for n in (9, 10)]
    kept, stats = decontaminate(tmp_path, texts, *riddles)
    assert stats["reasons"] == {"many_pieces": 1}
    assert [text.count("\n\n") + 1 for text in kept] == [10]


def test_workers_and_shards_change_no_text_and_run_does_what_count_and_cut_do(tmp_path: Path, command: Command) -> None:
    texts = [f"{prose(n)} {ITEM if n % 17 == 0 else ''}. {prose(n + 1)}" for n in range(100)]
    one, _ = decontaminate(tmp_path, texts)
    assert decontaminate(tmp_path, texts, workers=2)[0] == one and all(ITEM not in text for text in one)
    parts = [texts[:40], [], texts[40:]]
    for number, part in enumerate(parts):
        write_shard(tmp_path / f"in/{number}.jsonl.zst", [document(n, text) for n, text in enumerate(part)])
    arguments = ["run", "--input", tmp_path / "in", "--files", tmp_path / "set.txt"]
    done = command("corpus.decontaminate", *arguments, "--output-dir", tmp_path / "out", "--workers", 3)
    assert done.returncode == 0, done.stderr
    shards = [read_shard(tmp_path / f"out/{number}.jsonl.zst") for number in range(3)]
    assert [found["text"] for shard in shards for found in shard] == one
    figures = [read_json(tmp_path / f"out/{number}.stats.json") for number in range(3)]
    assert [found["documents_in"] for found in figures] == [40, 0, 60]


def test_counts_of_other_evaluation_sets_or_shards_are_not_read_and_a_corpus_that_ends_empty_is_an_error(
    tmp_path: Path,
) -> None:
    decontaminate(tmp_path, [ITEM, f"{FILLER * 20}{ITEM}."])
    counted = read_json(tmp_path / "counts.json")
    stale = {**counted, "counts": dict.fromkeys(counted["counts"], 1000)}
    for name, content in (("0000", counted), ("0001", counted), ("0002", stale)):
        write_json(tmp_path / "counts" / f"{name}.counts.json", content)
    (tmp_path / "other.txt").write_text(prose(9, 20))
    given = ("sum", "--counts", tmp_path / "counts", "--output", tmp_path / "sum.json")
    cut = ("cut", "--input", tmp_path / "in.zst", "--output", tmp_path / "cut.zst", "--counts", tmp_path / "sum.json")
    for shards, left in (("2", False), ("3", True)):
        assert called("corpus.decontaminate", *given, "--shards", shards).returncode == 0
        assert called("corpus.decontaminate", *cut, "--files", tmp_path / "set.txt").returncode == 0
        assert any(ITEM in found["text"] for found in read_shard(tmp_path / "cut.zst")) == left
    assert_one_line_error(called("corpus.decontaminate", *given, "--shards", "5"), "0003.counts.json")
    assert_one_line_error(called("corpus.decontaminate", *cut, "--files", tmp_path / "other.txt"), "sum.json")
    decontaminate(tmp_path, [ITEM])
    empty = ("cut", "--input", tmp_path / "in.zst", "--output", tmp_path / "new.zst", "--files", tmp_path / "set.txt")
    ended = called("corpus.decontaminate", *empty, "--counts", tmp_path / "counts.json")
    assert_one_line_error(ended, "1 contaminated")
    assert not (tmp_path / "new.zst").exists()
