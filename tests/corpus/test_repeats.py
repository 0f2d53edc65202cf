from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import InputError
from common.files import Document, read_json
from common.settings import RepeatsSettings
from corpus.dedup.signatures import normalised
from corpus.repeats import count, cut, without
from corpus.segments import Segments
from corpus.text import repeats
from corpus.text.repeats import Repeats, find_units, write_repeats
from tests.helpers import assert_one_line_error, called, document, prose, read_rejects, read_shard, write_shard

LINE = "All rights reserved: this footer stands below every page, at 12 €, of this long web site that says nothing else"
"""Of 50 tokens or so."""


def repeated(folder: Path, shards: list[list[Document]], workers: int = 1, **keys: Any) -> list[Document]:
    """What is left of all shards, by id; `0.rejects.zst`, `0.json` and so on lie beside it."""
    settings = RepeatsSettings(**{"units": ["lines"], "min_characters": 0, **keys})
    folder.mkdir(exist_ok=True)
    for number, documents in enumerate(shards):
        count(write_shard(folder / f"{number}.jsonl.zst", documents), folder / f"{number}.units", settings)
    write_repeats([folder / f"{number}.units" for number in range(len(shards))], folder / "all.repeats", settings)
    left = []
    for number in range(len(shards)):
        output, rejects = folder / f"{number}.out.zst", folder / f"{number}.rejects.zst"
        options: Any = {"rejects": rejects, "workers": workers, "allow_empty": True}
        stats = cut(folder / f"{number}.jsonl.zst", folder / "all.repeats", output, settings, **options)
        stats.finish(folder / f"{number}.json")
        left += read_shard(output)
    return sorted(left, key=lambda found: str(found["id"]))


def split(documents: list[Document], shards: int) -> list[list[Document]]:
    return [documents[number::shards] for number in range(shards)]


def test_every_planted_repeat_but_one_copy_is_cut_whatever_surrounds_it_and_however_it_is_written(
    tmp_path: Path,
) -> None:
    written = [LINE, LINE.upper(), f"\t {LINE}  \r", LINE.replace(" ", " \u00a0"), LINE.replace("12", "１２")]
    paragraph = "\n".join(written[number] + f" {number}" for number in range(5))
    texts = [f"{prose(n)}\n{written[n % 5]}\n{prose(n + 100)}\n\n{paragraph}\n\nend {n}" for n in range(20)]
    texts += [f"{LINE}\n{LINE}\n{LINE}", LINE]
    documents = [document(n, text) for n, text in enumerate(texts)]
    left = repeated(tmp_path / "lines", split(documents, 3))
    lines = Counter(normalised(line) for found in left for line in found["text"].split("\n"))
    assert lines[normalised(LINE)] == 1 and all(lines[normalised(f"{LINE} {number}")] == 1 for number in range(5))
    assert all(lines[normalised(prose(n))] == 1 for n in (*range(20), *range(100, 120)))
    left = repeated(tmp_path / "paragraphs", split(documents, 3), units=["paragraphs"])
    assert sum(paragraph in found["text"] for found in left) == 1
    assert all(f"{prose(n + 100)}\n\nend {n}" in left[n]["text"] for n in range(20) if paragraph not in left[n]["text"])


TEXTS = st.lists(st.text("aA \n", max_size=12), min_size=1, max_size=8)


@example(texts=["aa\nAA\naa"], max_count=1, paragraphs=False, keep_first=True)
@given(texts=TEXTS, max_count=st.integers(1, 3), paragraphs=st.booleans(), keep_first=st.booleans())
def test_exactly_what_a_dictionary_finds_is_cut(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], max_count: int, paragraphs: bool, keep_first: bool
) -> None:
    keys = {"units": ["paragraphs" if paragraphs else "lines"], "min_bytes": 2, "max_count": max_count}
    documents = [document(n, text) for n, text in enumerate(texts)]
    left = repeated(tmp_path_factory.mktemp("x"), split(documents, 2), **keys, keep_first=keep_first)

    def units(text: str) -> list[str]:
        blocks = "\n".join(line if line.strip() else "" for line in text.split("\n")).split(
            "\n\n" if paragraphs else "\n"
        )
        return [form for block in blocks if len((form := normalised(block)).encode()) >= 2]

    before = Counter(unit for text in texts for unit in units(text))
    after = Counter(unit for found in left for unit in units(found["text"]))
    expected = {unit: times if times <= max_count else int(keep_first) for unit, times in before.items()}
    assert after == Counter({unit: times for unit, times in expected.items() if times})


def test_which_text_survives_depends_on_no_shards_workers_memory_or_parts_and_run_does_all_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["\n".join([prose(n % 7, 15), prose(n, 15), "", prose(n % 5, 30), prose(n % 11, 15)]) for n in range(90)]
    documents = [document(n, text) for n, text in enumerate(texts)]
    documents += documents[:5]  # equal documents share one key
    one = repeated(tmp_path / "1", [documents], units=["lines", "paragraphs"])
    assert sum(len(found["text"]) for found in one) < sum(map(len, texts)) / 2
    monkeypatch.setattr(repeats, "CHUNK", 8)
    for shards, workers, memory in ((1, 3, 1.0), (4, 1, 1e-6), (4, 3, 2e-4)):
        folder = tmp_path / f"{shards}{workers}"
        keys = {"units": ["lines", "paragraphs"], "memory_gb": memory}
        assert repeated(folder, split(documents, shards), workers, **keys) == one
        hashes = np.concatenate(Segments(folder / "all.repeats").mapped("hash")).tolist()
        assert len(hashes) == len(set(hashes)), "the parts of the range do not overlap"
    phases, run = tmp_path / "41", tmp_path / "run"
    inputs = [phases / f"{number}.jsonl.zst" for number in range(4)]
    keys = ("repeats.units=[lines, paragraphs]", "repeats.min_characters=0")
    assert called("corpus.repeats", "run", "--input", *inputs, "--output-dir", run, *keys).returncode == 0
    for number, path in enumerate(inputs):
        assert (run / path.name).read_bytes() == (phases / f"{number}.out.zst").read_bytes()
        assert (run / "rejects" / path.name).read_bytes() == (phases / f"{number}.rejects.zst").read_bytes()
    assert len(list(run.iterdir())) == 4 + 4 + 1, "shards, statistics, rejects, and no hashes"
    assert_one_line_error(called("corpus.repeats", "run", "--input", *inputs, "--output-dir", phases, *keys), "0.jsonl")


def test_rejects_and_statistics_show_what_was_cut(tmp_path: Path) -> None:
    texts = [f"{prose(n)}\n\n{LINE}\n\n{prose(n + 9)}" for n in range(4)] + [f"{LINE}\nshort"]
    left = repeated(tmp_path, [[document(n, text) for n, text in enumerate(texts)]], min_characters=200)
    rejects = {reject["reason"]: reject for reject in read_rejects(tmp_path / "0.rejects.zst")}
    stats = read_json(tmp_path / "0.json")
    assert stats["cut"] == {
        "units": 4,
        "characters": 4 * len(LINE),
        "documents": 4,
        "most_frequent": [{"count": 5, "text": LINE}],
    }
    assert rejects["cut"]["cut"] == [{"count": 5, "text": LINE}]
    assert stats["documents_in"] == 5 == stats["documents_out"] + sum(stats["reasons"].values())
    changed = [found["text"] for found in left if LINE not in found["text"]]
    assert changed == [f"{prose(n)}\n\n{prose(n + 9)}" for n in range(4) if LINE not in left[n]["text"]]


@pytest.mark.parametrize(
    ("lines", "gone", "left"),
    [
        (["a", "", "x", "", "b"], {2}, "a\n\nb"),
        (["a", "x", "", "b"], {1}, "a\n\nb"),
        (["x", "", "b", ""], {0}, "b\n"),
        (["a", "", "", "x", " "], {3}, "a"),
        (["x", "y"], {0, 1}, ""),
    ],
)
def test_a_cut_leaves_one_blank_line_between_paragraphs(lines: list[str], gone: set[int], left: str) -> None:
    assert without(lines, gone) == left


def test_a_unit_is_compared_from_min_bytes_on_and_a_paragraph_of_one_line_once() -> None:
    settings = RepeatsSettings(units=["lines", "paragraphs"], min_bytes=4)
    found = find_units(["four", "abc", "", "éé", " ", "abc"], settings)
    assert [(unit.start, unit.end) for unit in found] == [(0, 2), (0, 1), (3, 4)]


def test_files_of_other_settings_and_changed_shards_are_one_line_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [document(n, prose(n)) for n in range(4)]
    repeated(tmp_path, [documents])
    with pytest.raises(InputError, match=r"0\.units: made by another version or with other settings"):
        write_repeats([tmp_path / "0.units"], tmp_path / "x", RepeatsSettings(units=["lines"], min_bytes=9))
    with monkeypatch.context() as patch:
        patch.setattr("corpus.text.repeats.RULE", 9)
        with pytest.raises(InputError, match=r"0\.units: made by another version"):
            write_repeats([tmp_path / "0.units"], tmp_path / "x", RepeatsSettings(units=["lines"]))
        with pytest.raises(InputError, match=r"all\.repeats: made by another version"):
            Repeats(tmp_path / "all.repeats", "0")
    shard = write_shard(tmp_path / "0.jsonl.zst", documents[:3])
    given = ["--input", shard, "--repeats", tmp_path / "all.repeats", "--output", tmp_path / "new.zst"]
    failed = called("corpus.repeats", "cut", *given, "repeats.units=[lines]")
    assert_one_line_error(failed, "0.jsonl.zst: has changed")
    assert not (tmp_path / "new.zst").exists()
    assert_one_line_error(called("corpus.repeats", "cut", *given), "repeats.units")
    given[1] = write_shard(tmp_path / "9.jsonl.zst", documents)
    other = called("corpus.repeats", "cut", *given, "repeats.units=[lines]")
    assert_one_line_error(other, "all.repeats: made without the shard 9")
