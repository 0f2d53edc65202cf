"""Tokens by domain and file are those of a replay of the loader, counted one by one."""

import math
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from common.files import read_json
from corpus.index import suffixed
from corpus.index.documents import DocumentWriter
from tests.workflow.provenance.test_trace import CONSUMED, SEQ_LEN, WIDTH, replay
from training.trace import Trace
from workflow.cards.content import read_content, targets_read


def trained_on(folder: Path) -> Counter[tuple[int, int]]:
    """How often tokens of each (corpus, document) were targets: all but samples' first ones."""
    found = Counter[tuple[int, int]]()
    for samples in replay(folder, micro=1, data_size=1):
        for sample in samples:
            found.update(divmod(token // WIDTH, 300) for token in sample[1:].tolist())
    return found


def test_targets_of_each_document_are_those_of_a_replay_over_full_epochs_and_a_part_of_one(model: Path) -> None:
    trace, expected, passes = Trace(model), trained_on(model), list[float]()
    for corpus, table in enumerate(trace.tables):
        passes.append(trace.blend.taken(trace.consumed, corpus) / len(trace.order(corpus, 0).epoch.samples))
        assert targets_read(trace, corpus, len(table)).tolist() == [expected[corpus, n] for n in range(len(table))]
    assert max(passes) > 1 and all(each % 1 for each in passes)
    content = read_content(trace, percent=100)
    assert content.tokens == content.crawled == CONSUMED[-1] * SEQ_LEN == expected.total()
    by_corpus = {f"c{c}.example": sum(n for (k, _), n in expected.items() if k == c) for c in range(len(passes))}
    assert dict(content.domains) == by_corpus and not content.files


def test_documents_count_for_their_domain_and_their_file_and_the_largest_domains_are_named(model: Path) -> None:
    trace, expected = Trace(model), trained_on(model)
    prefix, documents = trace.prefixes[0], []
    for number in range(len(trace.tables[0])):
        url = {"url": f"http://h{number}.d{number % 5}.example/"} if number % 4 in (0, 2) else {}
        origin = {"origin": f"{'books.jsonl' if number % 4 == 1 else 'dump.warc.gz'}:7"} if number % 4 in (1, 2) else {}
        documents.append({"id": f"{number:x}", **url, **origin})
    with ExitStack() as stack, suffixed(prefix, ".docs").open("wb") as file:
        table = DocumentWriter(prefix.parent, stack)
        table.add(documents, "0000")
        table.finish(file, read_json(suffixed(prefix, ".json"))["bin"])
    for other in trace.prefixes[1:]:  # as of another tool
        suffixed(other, ".docs").unlink()

    domains, files, crawled = Counter[str](), Counter[str](), 0
    for number, document in enumerate(documents):
        count = expected[0, number]
        domains[document["url"].split(".", 1)[1].rstrip("/") if "url" in document else ""] += count
        files[document["origin"].removesuffix(":7") if "origin" in document else ""] += count
        crawled += count if "url" in document and "origin" not in document else 0
    del domains[""], files[""]
    content = read_content(Trace(model), percent=41)
    assert content.domain_count == len(+domains) and len(content.domains) == math.ceil(0.41 * len(+domains))
    assert content.domains == domains.most_common(len(content.domains))
    assert content.files == files.most_common() and content.crawled == crawled
    assert content.tokens == expected.total() > crawled + files.total()
    assert read_content(Trace(model), 41, 1).domains == content.domains[:1]
