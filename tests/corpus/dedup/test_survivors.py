"""Which documents survive, compared with the rule written down plainly: every text with every kept
one of its group.
"""

import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.files import Document
from common.settings import DedupSettings
from common.workers import Workers
from corpus.dedup import survivors
from corpus.dedup.clusters import filter_shard, write_clusters
from corpus.dedup.pairs import write_edges, write_pairs
from corpus.dedup.shingles import jaccard, normalised, shingles
from corpus.dedup.signatures import Signatures, key_of, write_signatures
from corpus.segments import Segments
from tests.corpus.dedup.test_against import signed
from tests.corpus.dedup.test_run import edited, run
from tests.helpers import document, prose, read_rejects, read_shard, write_shard

Fates = dict[str, tuple[str, float]]
"""For each document the kept one that it resembles and their similarity, (its own id, 1) if it is
kept.
"""


def chain(seed: int, count: int) -> list[str]:
    """Texts of which each is like the next, and unlike those further on."""
    words = prose(seed, 60 + 6 * count).split()
    return [" ".join(words[6 * number : 6 * number + 60 + (seed + 3 * number) % 5]) for number in range(count)]


def template(seed: int, count: int) -> list[str]:
    """Copies of a text with other words in its gaps: near the threshold."""
    return [edited(prose(seed, 60), 0.03, number) for number in range(count)]


def copies(seed: int, count: int) -> list[str]:
    """Texts that differ in case and white space only."""
    text = prose(seed, 50)
    return [text.upper(), text.replace(" ", "\n", 5), f"  {text}", text.replace("e", "e\u00ad", 3)][:count]


RULES = DedupSettings(bands=30, rows=4)  # finds more pairs than the defaults
FAMILIES = st.lists(
    st.tuples(st.sampled_from([chain, template, copies]), st.integers(0, 5), st.integers(1, 14)), min_size=1, max_size=4
)


def phases(folder: Path, shards: list[list[Document]], rules: DedupSettings, jobs: int) -> tuple[Signatures, Fates]:
    """Run all phases; returns the signatures, and what became of each document."""
    paths = [write_shard(folder / f"{number:04d}.jsonl.zst", shard) for number, shard in enumerate(shards)]
    files = [folder / f"{number:04d}.signatures" for number in range(len(paths))]
    for path, file in zip(paths, files, strict=True):
        write_signatures(path, file, rules, Workers(1))
    signatures, clusters = Signatures(files, rules), folder / "all.clusters"
    pairs, edges = ([folder / f"{job}.{kind}" for job in range(jobs)] for kind in ("pairs", "edges"))
    for job in range(jobs):
        write_pairs(signatures, pairs[job], rules, job, jobs)
    for job in range(jobs):
        write_edges(signatures, pairs, edges[job], rules, job)
    figures = write_clusters(signatures, pairs, edges, clusters, rules)
    fates: Fates = {}
    for path in paths:
        filter_shard(path, clusters, folder / "out")
        fates |= {one["id"]: (one["id"], 1.0) for one in read_shard(folder / "out" / path.name)}
        removed = read_rejects(folder / "out/removed" / path.name)
        fates |= {one["id"]: (one["survivor"], one["similarity"]) for one in removed}
    assert sum(int(size) * count for size, count in figures["cluster_sizes"].items()) >= len(fates)
    return signatures, fates


def by_the_rule(signatures: Signatures, edge_files: list[Path], rules: DedupSettings) -> Fates:
    """The rule, for the edges of phase 3."""
    documents = list(signatures.documents(np.arange(signatures.count)))
    texts = [normalised(one["text"]) for one in documents]
    sets, group, linked = [shingles(text, rules) for text in texts], list(range(len(texts))), {}
    for path in edge_files:
        with Segments(path) as file:
            for pairs, similarity in zip(file.each("edges"), file.each("similarity"), strict=True):
                for one, other in pairs.reshape(-1, 2).tolist():
                    linked[one, other] = jaccard(sets[one], sets[other])
                assert similarity.tolist() == [linked[one, other] for one, other in pairs.reshape(-1, 2).tolist()]
    new = range(signatures.earlier, len(texts))
    for one, other in [*linked, *((a, b) for a in new for b in range(a) if texts[a] == texts[b])]:
        group = [group[one] if each == group[other] else each for each in group]
    similar = {frozenset((texts[one], texts[other])): each for (one, other), each in linked.items()}

    def order(row: int) -> tuple[bool, int]:
        return row in new, key_of(documents[row]["id"], documents[row]["text"])

    kept, fates, decided = list[int](), Fates(), dict[str, tuple[int, float]]()
    for row in sorted(range(len(texts)), key=order):
        mates = [one for one in kept if group[one] == group[row]] if row in new else []
        likes = [decided[texts[row]]] if row in new and texts[row] in decided else []  # equal texts go together
        paired = [(one, similar.get(frozenset((texts[row], texts[one])), 0.0)) for one in mates]
        likes = likes or [like for like in paired if like[1]]
        likes = likes or [like for one in mates if (like := (one, jaccard(sets[row], sets[one])))[1] >= rules.threshold]
        best, similarity = max(likes, key=lambda like: (like[1], -kept.index(like[0])), default=(row, 1.0))
        kept += [row] * (best == row)
        decided.setdefault(texts[row], (best, similarity))
        fates[documents[row]["id"]] = documents[best]["id"], round(similarity, 4)
    return {name: fates[name] for name in (documents[row]["id"] for row in new)}


@hypothesis.settings(max_examples=15, deadline=None)
@given(FAMILIES, FAMILIES | st.just([]), st.integers(1, 4), st.randoms(use_true_random=False))
def test_survivors_are_those_of_the_rule_whatever_shards_order_jobs_and_memory(
    families: list[Any], old: list[Any], parts: int, chance: random.Random
) -> None:
    def made(families: list[Any], first: int) -> list[Document]:
        texts = [text for family, seed, count in families for text in family(seed, count)]
        return [document(first + number, text) for number, text in enumerate(texts)]

    documents = made(families, 0)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        against = [signed(folder / "old", made(old, 1000), 2, RULES)] if old else []
        rules = RULES.model_copy(update={"against": against})
        signatures, fates = phases(folder / "one", [documents], rules, 1)
        assert fates == by_the_rule(signatures, [folder / "one/0.edges"], rules)
        texts = {one["id"]: shingles(normalised(one["text"]), rules) for one in [*documents, *made(old, 1000)]}
        for name, (survivor, similarity) in fates.items():
            assert similarity == round(jaccard(texts[name], texts[survivor]), 4) >= round(rules.threshold, 4)
            assert fates.get(survivor, (survivor, 1.0)) == (survivor, 1.0), "the survivor is kept"
        chance.shuffle(documents)
        other = rules.model_copy(update={"memory_gb": chance.choice([1e-6, 1e-4]), "ranges": parts})
        assert phases(folder / "two", [documents[part::parts] for part in range(parts)], other, parts)[1] == fates


@pytest.mark.parametrize(("limit", "value"), [("_COMPARED", 1), ("_KEPT_BYTES", 256)], ids=["candidates", "bitmaps"])
def test_where_a_limit_leaves_comparisons_out_documents_are_kept_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    texts = [edited(prose(1, 60), 0.07, number) for number in range(100)]
    documents = [document(number, text) for number, text in enumerate(texts)]
    sets = {one["id"]: shingles(normalised(one["text"]), RULES) for one in documents}
    monkeypatch.setattr(survivors, limit, value)
    found, figures = run(tmp_path / "limited", [documents])
    assert 0 < figures["not_compared_with_all"] < figures["compared"]
    removed = {one["id"]: one for one in found if "survivor" in one}
    assert sum(figures["near_similarities"].values()) == len(removed)
    assert json.loads((tmp_path / "limited/out/clusters.json").read_text()).items() <= figures.items()
    for name, one in removed.items():
        assert one["survivor"] not in removed
        assert one["similarity"] == round(jaccard(sets[name], sets[one["survivor"]]), 4) >= RULES.threshold
    again = run(tmp_path / "again", [documents[::2], documents[1::2]], rules=DedupSettings(memory_gb=1e-6))
    assert {one["id"]: one.get("survivor") for one in again[0]} == {one["id"]: one.get("survivor") for one in found}
    monkeypatch.undo()
    whole, figures = run(tmp_path / "whole", [documents])
    assert figures["not_compared_with_all"] == 0 and sum("survivor" in one for one in whole) > len(removed)
