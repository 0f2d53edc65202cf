import hashlib
import unicodedata
from pathlib import Path

import pytest

from common.errors import EmptyResultError, InputError
from common.files import read_json, write_json
from common.settings import DecontaminateSettings
from corpus.decontaminate import count, cut, main
from tests.conftest import Command
from tests.helpers import assert_one_line_error, document, prose, read_rejects, read_shard, write_shard

ITEM = "Which river did the old surveyor cross before he finally reached his camp in the northern valley"
FILLER = "This sentence has nothing to do with it at all. "


def decontaminate(folder: Path, texts: list[str], workers: int = 1) -> tuple[list[str], dict[str, object]]:
    (folder / "set.txt").write_text(f"{ITEM}\n")
    settings = DecontaminateSettings(files=[str(folder / "set.txt")])
    shard = write_shard(folder / "in.jsonl.zst", [document(n, text) for n, text in enumerate(texts)])
    write_json(folder / "counts.json", count([shard], settings, workers))
    output = folder / "out.jsonl.zst"
    stats = cut([shard], [folder / "counts.json"], output, settings, folder / "rejects.zst", workers, allow_empty=True)
    return [found["text"] for found in read_shard(output)], stats.as_dict()


def test_a_match_is_cut_with_200_characters_on_each_side_to_the_end_of_a_sentence(tmp_path: Path) -> None:
    before, after = "Before it. " * 50, "After it! " * 50
    (kept,), stats = decontaminate(tmp_path, [f"{before}{ITEM.upper()}? {after}"])
    first, second = kept.split("\n\n")
    assert before.startswith(first) and first.endswith("it.") and 200 <= len(before) - len(first) < 215
    assert after.strip().endswith(second) and second.startswith("After") and 200 <= len(after) - len(second) < 215
    assert stats["evaluation_sets"] == {
        str(tmp_path / "set.txt"): {"ngrams": 5, "ignored": 0, "hits": 5, "documents": 1}
    }


def test_clean_documents_are_not_touched_and_short_pieces_are_dropped(tmp_path: Path) -> None:
    clean = prose(1)
    kept, stats = decontaminate(tmp_path, [clean, f"Short. {ITEM}. Short.", f"{FILLER * 20}{ITEM}"])
    assert kept[0] == clean and len(kept) == 2 and ITEM not in kept[1]
    assert stats["reasons"] == {"contaminated": 1}
    assert read_rejects(tmp_path / "rejects.zst")[0]["text"] == f"Short. {ITEM}. Short."


def test_n_grams_seen_ten_times_in_the_corpus_stay(tmp_path: Path) -> None:
    text = f"{FILLER * 20}{ITEM}. {FILLER * 20}"
    kept, stats = decontaminate(tmp_path, [text] * 10)
    assert kept == [text] * 10
    assert stats["evaluation_sets"][str(tmp_path / "set.txt")]["ignored"] == 5  # type: ignore[index]
    kept, _ = decontaminate(tmp_path, [text] * 9)
    assert len(kept) == 9 and all(ITEM not in found for found in kept)


def test_a_document_in_more_than_ten_pieces_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "set.txt").write_text("\n".join(f"a riddle of eight words or more is number {n}" for n in range(11)))
    settings = DecontaminateSettings(files=[str(tmp_path / "set.txt")])
    texts = [
        "".join(f"{FILLER * 20}a riddle of eight words or more is number {n}. " for n in range(m)) for m in (10, 11)
    ]
    shard = write_shard(tmp_path / "in.zst", [document(n, text + FILLER * 20) for n, text in enumerate(texts)])
    write_json(tmp_path / "c.json", count([shard], settings))
    stats = cut([shard], [tmp_path / "c.json"], tmp_path / "out.zst", settings, allow_empty=True)
    assert stats.reasons == {"many_pieces": 2}, "11 and 12 pieces"
    more = settings.model_copy(update={"max_pieces": 11})
    assert cut([shard], [tmp_path / "c.json"], tmp_path / "out.zst", more).reasons == {"many_pieces": 1}


def test_the_worker_count_and_the_shards_change_no_text(tmp_path: Path) -> None:
    texts = [f"{prose(n)} {ITEM if n % 17 == 0 else ''}. {prose(n + 1)}" for n in range(150)]
    one, _ = decontaminate(tmp_path, texts)
    assert decontaminate(tmp_path, texts, workers=2)[0] == one
    settings = DecontaminateSettings(files=[str(tmp_path / "set.txt")])
    halves = [write_shard(tmp_path / f"{n}.zst", [document(m, t) for m, t in enumerate(texts[n::2])]) for n in (0, 1)]
    for number, half in enumerate(halves):
        write_json(tmp_path / f"c{number}.json", count([half], settings))
    kept: list[str] = []
    for half in halves:
        cut([half], [tmp_path / "c0.json", tmp_path / "c1.json"], tmp_path / "out.zst", settings)
        kept += [found["text"] for found in read_shard(tmp_path / "out.zst")]
    assert sorted(kept) == sorted(one) and all(ITEM not in text for text in one)


# An item of an evaluation set, how a page may write it, and sentences of its language. Spaces between Thai sentences.
LANGUAGES = {
    "decomposed": (
        "Quelle rivière le vieux géomètre a-t-il traversée avant d’arriver enfin à son camp?",
        "NFD",
        "Été. ",
    ),
    "capitals": ("Welche Straße nahm der große Geometer zu seinem fußläufigen Lager im Norden?", str.upper, "Maße. "),
    "full width": (ITEM, lambda text: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text), FILLER),
    "soft hyphens": (ITEM, lambda text: text.replace("ve", "v\u00ade"), FILLER),
    "Chinese": ("老测量员在最后到达北部山谷的营地之前渡过了哪条河流", str, "这句话和它没有任何关系。"),
    "Japanese": (
        "年老いた測量士は北の谷の野営地に着く前にどの川を渡りましたか",
        str,
        "この文はそれと関係がありません。",
    ),
    "Thai": ("นักสำรวจชราข้ามแม่น้ำสายใดก่อนที่จะถึงค่ายในหุบเขาทางเหนือ", "NFKC", "ประโยคนี้ไม่เกี่ยวข้องกัน "),
    "Khmer": ("តើអ្នកស្ទង់ចាស់បានឆ្លងកាត់ទន្លេណាមុនពេលទៅដល់ជំរុំនៅជ្រលងភ្នំខាងជើង", str, "ប្រយោគនេះមិនទាក់ទងទេ។"),
    "Burmese": ("အဘိုးအိုမြေတိုင်းသည်စခန်းသို့မရောက်မီမည်သည့်မြစ်ကိုဖြတ်ကူးခဲ့သနည်း", str, "ဤစာကြောင်းသည်မသက်ဆိုင်ပါ။"),
    "Lao": ("ນັກສຳຫຼວດເກົ່າໄດ້ຂ້າມແມ່ນ້ຳສາຍໃດກ່ອນທີ່ຈະໄປຮອດຄ້າຍຢູ່ຮ່ອມພູທາງເໜືອ", str, "ປະໂຫຍກນີ້ບໍ່ກ່ຽວຂ້ອງ "),
    "Hindi": (
        "बूढ़े सर्वेक्षक ने अपने शिविर तक पहुँचने से पहले कौन सी नदी पार की",
        lambda text: text.replace("\u0922\u093c", "\u095d"),
        "यह वाक्य अलग है। ",
    ),
    "Chinese with English": (
        "请使用Python编写一个函数来计算northern valley里所有河流的长度",
        str,
        "这句话和它没有任何关系。",
    ),
}


@pytest.mark.parametrize("name", LANGUAGES)
def test_an_item_is_found_in_other_forms_and_scripts_and_only_its_surroundings_are_cut(
    tmp_path: Path, name: str
) -> None:
    item, written, sentence = LANGUAGES[name]
    found = unicodedata.normalize(written, item) if isinstance(written, str) else written(item)
    assert found != item or written is str or name == "Thai"
    (tmp_path / "set.txt").write_text(f"{item}\n")
    settings = DecontaminateSettings(files=[str(tmp_path / "set.txt")])
    filler = sentence * (600 // len(sentence))
    texts = [f"{filler}{found}{sentence[-1]}{filler}", filler, f"{filler}{item[: len(item) // 4]}{filler}"]
    shard = write_shard(tmp_path / "in.zst", [document(n, text) for n, text in enumerate(texts)])
    write_json(tmp_path / "c.json", count([shard], settings))
    cut([shard], [tmp_path / "c.json"], tmp_path / "out.zst", settings)
    kept, *others = [d["text"] for d in read_shard(tmp_path / "out.zst")]
    assert others == texts[1:], "what has no match stays as it was, byte for byte"
    before, after = kept.split("\n\n")
    assert filler.startswith(before) and filler.strip().endswith(after), "whole sentences of the original text"
    assert all(200 < len(piece) <= len(filler) - 200 + len(sentence) for piece in (before, after))


def test_short_and_common_phrases_of_scripts_without_spaces_are_not_looked_for(tmp_path: Path) -> None:
    (tmp_path / "set.txt").write_text("中国的首都是哪个城市\nแม่น้ำสายใด\n日本の首都はどこですか\n")
    with pytest.raises(InputError, match=r"no item of 8 words or more \(in Chinese: 12 characters\)"):
        count([], DecontaminateSettings(files=[str(tmp_path / "set.txt")]))


def test_counts_of_words_that_were_made_otherwise_are_refused(tmp_path: Path) -> None:
    decontaminate(tmp_path, [prose(1)])
    before = hashlib.sha256("\n".join(ngrams_of_item()).encode()).hexdigest()[:16]  # until version 0.2
    write_json(tmp_path / "counts.json", {"ngrams": before, "counts": {}})
    settings = DecontaminateSettings(files=[str(tmp_path / "set.txt")])
    with pytest.raises(InputError, match=r"counts.json: not counted with these evaluation sets"):
        cut([tmp_path / "in.jsonl.zst"], [tmp_path / "counts.json"], tmp_path / "out.zst", settings)


def ngrams_of_item() -> list[str]:
    found = ITEM.lower().split()
    return sorted(" ".join(found[start : start + 13]) for start in range(len(found) - 12))


def test_counts_of_other_evaluation_sets_are_refused(tmp_path: Path) -> None:
    decontaminate(tmp_path, [prose(1)])
    (tmp_path / "other.txt").write_text(prose(9, 20))
    settings = DecontaminateSettings(files=[str(tmp_path / "other.txt")])
    with pytest.raises(InputError, match=r"counts.json: not counted with these evaluation sets"):
        cut([tmp_path / "in.jsonl.zst"], [tmp_path / "counts.json"], tmp_path / "out.zst", settings)


def test_a_corpus_that_ends_empty_is_an_error(tmp_path: Path) -> None:
    decontaminate(tmp_path, [ITEM])
    settings = DecontaminateSettings(files=[str(tmp_path / "set.txt")])
    with pytest.raises(EmptyResultError, match=r"none of 1 documents is left \(1 contaminated\)"):
        cut([tmp_path / "in.jsonl.zst"], [tmp_path / "counts.json"], tmp_path / "new.zst", settings)
    assert not (tmp_path / "new.zst").exists()


def test_run_writes_every_shard_alike_whatever_the_workers(tmp_path: Path) -> None:
    (tmp_path / "set.txt").write_text(f"{ITEM}\n")
    texts = [f"{FILLER * 20}{ITEM if n % 50 == 0 else ''}. {prose(n)}" for n in range(200)]
    for shard, chosen in enumerate((texts[:90], [], texts[90:])):
        write_shard(tmp_path / "in" / f"{shard}.jsonl.zst", [document(n, text) for n, text in enumerate(chosen)])
    arguments = ["run", "--files", str(tmp_path / "set.txt"), "--input", str(tmp_path / "in")]
    for workers in ("1", "3"):
        assert main([*arguments, "--output-dir", str(tmp_path / workers), "--workers", workers]) == 0
    for shard, size in enumerate((90, 0, 110)):
        one, three = (tmp_path / workers / f"{shard}.jsonl.zst" for workers in ("1", "3"))
        assert one.read_bytes() == three.read_bytes() and len(read_shard(one)) == size
        assert read_json(tmp_path / "3" / f"{shard}.stats.json")["documents_in"] == size


def test_run_does_what_count_and_cut_do(tmp_path: Path, command: Command) -> None:
    kept, stats = decontaminate(tmp_path, [f"{FILLER * 20}{ITEM}.", prose(1)])
    folder = tmp_path / "run"
    arguments = ("--input", tmp_path / "in.jsonl.zst", "--files", tmp_path / "set.txt")
    result = command("corpus.decontaminate", "run", *arguments, "--output-dir", folder)
    assert result.returncode == 0, result.stderr
    assert [found["text"] for found in read_shard(folder / "in.jsonl.zst")] == kept
    assert read_json(folder / "in.stats.json")["evaluation_sets"] == stats["evaluation_sets"]
    assert_one_line_error(command("corpus.decontaminate", "run", *arguments[:2], "--output-dir", folder), "--files")
    result = command("corpus.decontaminate", "run", *arguments[:3], tmp_path / "none.txt", "--output-dir", folder)
    assert_one_line_error(result, "none.txt", "no such file or folder")


def test_counts_of_shards_that_the_run_does_not_have_are_not_read(tmp_path: Path, command: Command) -> None:
    decontaminate(tmp_path, [f"{FILLER * 20}{ITEM}.", prose(1)])
    counted = read_json(tmp_path / "counts.json")
    stale = {**counted, "counts": dict.fromkeys(counted["counts"], 1000)}
    for name, content in (("0000", counted), ("0001", counted), ("0002", stale), ("0003", stale)):
        write_json(tmp_path / "counts" / f"{name}.counts.json", content)
    arguments = (
        "--input",
        tmp_path / "in.jsonl.zst",
        "--files",
        tmp_path / "set.txt",
        "--output",
        tmp_path / "cut.zst",
    )
    arguments = (*arguments, "--counts", tmp_path / "counts")
    for shards, left in (("2", False), ("3", True)):
        result = command("corpus.decontaminate", "cut", *arguments, "--shards", shards)
        assert result.returncode == 0, result.stderr
        assert any(ITEM in found["text"] for found in read_shard(tmp_path / "cut.zst")) == left
    result = command("corpus.decontaminate", "cut", *arguments[:-1], tmp_path / "set.txt", "--shards", "2")
    assert_one_line_error(result, "must be one folder")
    result = command("corpus.decontaminate", "cut", *arguments, "--shards", "5")
    assert_one_line_error(result, "0004.counts.json")
