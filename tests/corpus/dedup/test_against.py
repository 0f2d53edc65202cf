"""Documents of earlier runs, which win."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.errors import InputError
from common.files import REMOVED_IDS, Document, write_text
from common.settings import DedupSettings
from common.workers import Workers
from corpus.dedup import signatures
from corpus.dedup.__main__ import dedup, main
from corpus.dedup.signatures import Signatures, content_of, identity_of, write_signatures
from tests.corpus.dedup.test_run import RULES, edited, run, survivor_ids
from tests.helpers import document, prose, write_shard

NAMES = 40


def signed(folder: Path, documents: Sequence[Document], shards: int = 1, rules: DedupSettings = RULES) -> Path:
    """A run with signatures, as it is while it has removed no document."""
    for number in range(shards):
        path = write_shard(folder / "clean" / f"{number:04d}.jsonl.zst", list(documents[number::shards]))
        output = folder / "dedup/work" / f"{number:04d}.signatures"
        output.parent.mkdir(parents=True, exist_ok=True)
        write_signatures(path, output, rules, Workers(1))
    return folder


@pytest.mark.parametrize("memory", [1.0, 1e-6], ids=["one pass", "several passes"])
def test_earlier_documents_win_and_are_neither_paired_nor_removed(tmp_path: Path, memory: float) -> None:
    texts = [prose(number) for number in range(NAMES)]
    old = [document(number, text) for number, text in enumerate(texts)]
    old.append(document(99, edited(texts[3], 0.01, 1)))  # a near duplicate inside the earlier run
    new = [
        document(100, texts[0]),  # equal
        document(101, texts[1] + " and longer than the earlier one"),  # near, and longer
        document(102, edited(texts[2], 0.5, 1)),  # different
        document(103, prose(1000)),
        document(104, prose(1000).upper()),  # equal to another new one
        document(105, edited(texts[3], 0.01, 2)),
        *(document(200 + number, prose(2000 + number)) for number in range(20)),
    ]
    random.Random(3).shuffle(new)
    earlier = signed(tmp_path / "earlier", old, shards=3)
    before = {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file()}
    rules = DedupSettings(against=[earlier], memory_gb=memory)
    documents, figures = run(tmp_path / "new", [new[::2], new[1::2]], rules=rules)
    found = {one["id"]: one.get("survivor", one["id"]) for one in documents}
    assert (figures["edges"], figures["candidate_pairs"]) == (5, 3), "no pair of earlier documents"
    gone = {name: best for name, best in found.items() if name != best}
    survivor_of_103 = min((f"{103:016x}", f"{104:016x}"))
    like_105 = gone[f"{105:016x}"]
    assert like_105 in (old[3]["id"], old[-1]["id"])
    assert gone == {
        f"{100:016x}": f"{0:016x}",
        f"{101:016x}": f"{1:016x}",
        f"{105:016x}": like_105,
        f"{104:016x}": survivor_of_103,
    }
    assert {path: path.read_bytes() for path in before} == before
    (tmp_path / "moved").mkdir()
    earlier.rename(tmp_path / "moved/run")
    again = survivor_ids(tmp_path / "again", [new], rules=DedupSettings(against=[tmp_path / "moved/run"]))
    assert again == found, "a moved run is found where it is, and shards make no difference"


def test_what_does_not_fit_the_signatures_is_named(tmp_path: Path) -> None:
    earlier = signed(tmp_path / "earlier", [document(1, prose(1)), document(2, prose(2))])
    new = write_shard(tmp_path / "0000.jsonl.zst", [document(3, prose(1) + " more"), document(4, prose(4))])
    for rules, message in (
        (DedupSettings(against=[earlier], bands=10), r"0000\.signatures: .*bands 20, here 10"),
        (DedupSettings(against=[tmp_path / "none", earlier]), r"none: .*corpus\.dedup signatures"),
    ):
        with pytest.raises(InputError, match=message):
            dedup([new], tmp_path / "out", rules)
    own = sorted(earlier.rglob("*.signatures"))
    with pytest.raises(InputError, match="names this run itself"):
        Signatures(own, DedupSettings(against=[earlier, earlier]))
    for documents in ([document(1, prose(1) + "."), document(2, prose(2))], [document(2, prose(2))], None):
        shard = earlier / "clean/0000.jsonl.zst"
        shard.unlink()
        if documents is not None:
            write_shard(shard, documents)
        with pytest.raises(InputError, match=r"clean/0000\.jsonl\.zst: changed since"):
            dedup([new], tmp_path / "out", DedupSettings(against=[earlier]))
        assert not (tmp_path / "out").exists()


def test_a_changed_byte_of_a_column_is_found_in_what_is_read(tmp_path: Path) -> None:
    documents = [document(number, prose(number, 20)) for number in range(3000)]
    file = signed(tmp_path, documents) / "dedup/work/0000.signatures"
    whole, rules = file.read_bytes(), DedupSettings()
    parts = 8
    for place in (100, 20_000, 8 * 3000 * 21 + 100):  # hashes of column 0, of another part of it, rows of column 0
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        damaged = 0
        for part in range(parts):
            try:
                Signatures([file], rules).part(0, part, parts)
            except InputError as error:
                damaged += "0000.signatures: changed" in str(error)
        assert damaged in (1, 2), "a bucket belongs to at most two parts"
    file.write_bytes(whole)
    rows = [row for part in range(parts) for row in Signatures([file], rules).part(1, part, parts)[0].tolist()]
    assert sorted(rows) == list(range(3000)), "every row once"


def test_what_an_earlier_run_removed_displaces_nothing_unless_its_survivor_was_taken_down(tmp_path: Path) -> None:
    words = prose(7, 400).split()
    first, second, third = (" ".join(words[start : start + 210 - start // 6]) for start in (0, 30, 60))
    old, new = [document(1, first), document(2, second), document(3, prose(1000))], document(100, third)
    earlier, rules = signed(tmp_path / "earlier", old), DedupSettings(against=[tmp_path / "earlier"])
    work = earlier / "dedup/work"

    def later(name: str) -> str:
        """The survivor of the new document."""
        return survivor_ids(tmp_path / name, [[new]], rules=rules)[new["id"]]

    assert later("signatures alone") == old[1]["id"], "as if the run had kept all"
    before = content_of([earlier])
    for phase in ("bands", "verify"):
        main([phase, "--work", str(work), "--part", "0/1"])
    main(["clusters", "--work", str(work)])
    assert later("removed") == new["id"], "it resembles only what the earlier run has removed"
    after = content_of([earlier])
    assert after != before, "a run that extends it has to be made again"
    write_text(earlier / REMOVED_IDS, f"{old[0]['id']}\n")
    shard = write_shard(earlier / "clean/0000.jsonl.zst", old[1:])
    file = work / "0000.signatures"
    write_signatures(shard, file, DedupSettings(), Workers(1), identity=identity_of(file))
    assert later("taken down") == old[1]["id"], "what the page displaced stays out"
    assert content_of([earlier]) == after, "a takedown repeats no later run"
    data = (work / "all.removed").read_bytes()
    (work / "all.removed").write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
    with pytest.raises(InputError, match=r"all\.removed: changed"):
        later("damaged")


def test_signatures_of_another_version_are_refused_with_the_command_that_makes_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signatures, "RULE", 1)
    earlier = signed(tmp_path / "earlier", [document(1, prose(1))])
    monkeypatch.undo()
    new, rules = write_shard(tmp_path / "0000.jsonl.zst", [document(2, prose(2))]), DedupSettings(against=[earlier])
    with pytest.raises(InputError, match="another version of this toolkit") as caught:
        dedup([new], tmp_path / "out", rules)
    main(str(caught.value).partition("python -m corpus.dedup ")[2].split())
    assert dedup([new], tmp_path / "out", rules).documents_out == 1
