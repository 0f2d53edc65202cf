"""Documents of earlier runs, which win."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.errors import InputError
from common.files import Document
from common.settings import DedupSettings
from common.workers import Workers
from corpus.dedup.__main__ import dedup
from corpus.dedup.signatures import Signatures, write_signatures
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
