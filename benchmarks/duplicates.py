"""Deduplication against datasketch, rensa and datatrove, and the near duplicates that are found.

    python -m benchmarks.corpus dedup
    python -m benchmarks.corpus datatrove --peer FOLDER

FOLDER is a virtual environment of datatrove's own; it is made and filled if it does not exist.
"""

import subprocess
import sys
from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from textwrap import fill
from typing import Any

import orjson

from benchmarks.harness import Row, Timed, compare, timed
from benchmarks.inputs import with_copies, write_documents
from common.files import Document, read_documents
from common.settings import DedupSettings

PACKAGES = ("datatrove==0.10.1", "spacy", "regex", "orjson", "tokenizers", "nltk", "xxhash<4")
SHARES = (0.01, 0.03, 0.05, 0.10, 0.20)
STAGES = ("signatures", "bands, buckets", "verify", "clusters", "filter")

# one stage in its own process, with its defaults: 14 buckets of 8 hashes over 5-grams of words,
# English
_THEIRS = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.typeshelper import Languages

stage, source, work = sys.argv[1:]
config, reader = MinhashConfig(), JsonlReader(source)
pipelines = {
    "signatures": lambda: [reader, MinhashDedupSignature(f"{work}/signatures", config, language=Languages.english)],
    "bands, buckets": lambda: [MinhashDedupBuckets(f"{work}/signatures", f"{work}/buckets", config=config)],
    "clusters": lambda: [MinhashDedupCluster(f"{work}/buckets", f"{work}/remove", config=config)],
    "filter": lambda: [reader, MinhashDedupFilter(f"{work}/remove"), JsonlWriter(f"{work}/out", compression=None)],
}
tasks = config.num_buckets if stage == "bands, buckets" else 1
LocalPipelineExecutor(pipelines[stage](), tasks=tasks, workers=1, logging_dir=f"{work}/logs/{stage[:5]}").run()
"""


def _ngrams(text: str) -> list[str]:
    return list({text[start : start + 5] for start in range(len(text) - 4)})


def _with_each(call: Callable[[str], object], source: Path) -> Timed:
    """Call a function with every text, already in memory."""
    texts = [document["text"] for document in read_documents(source)]
    return lambda: deque(map(call, texts), maxlen=0)


def rensa_signatures(source: Path) -> Timed:
    """R-MinHash with 120 permutations over character 5-grams."""
    from rensa import RMinHash

    def signature(text: str) -> None:
        minhash = RMinHash(num_perm=120, seed=1)
        minhash.update(_ngrams(text))
        minhash.digest()

    return _with_each(signature, source)


def our_signatures(source: Path) -> Timed:
    """MinHash with 120 permutations over character 5-grams of the normalised text."""
    from corpus.dedup.shingles import MinHasher, normalised

    hasher = MinHasher(DedupSettings())
    return _with_each(lambda text: hasher.signature(normalised(text)), source)


def datasketch_dedup(source: Path) -> Timed:
    """datasketch's recipe with the same bands: keeps the first document, verifies nothing."""
    from datasketch import MinHash, MinHashLSH

    def signature(document: Document) -> Any:
        minhash = MinHash(num_perm=120, seed=1)
        minhash.update_batch([shingle.encode() for shingle in _ngrams(document["text"])])
        return minhash

    signature(next(read_documents(source)))

    def run() -> None:
        index = MinHashLSH(num_perm=120, params=(20, 6))
        for document in read_documents(source):
            minhash = signature(document)
            if not index.query(minhash):
                index.insert(document["id"], minhash)

    return run


def our_dedup(source: Path, target: Path) -> Timed:
    """`corpus.dedup run`, with reading, signatures, verification and writing."""
    from corpus.dedup.__main__ import dedup

    few = write_documents(source.with_name("few.jsonl.zst"), islice(read_documents(source), 20))
    dedup([few], target.with_name("warm"), DedupSettings())  # imports modules
    return lambda: {"kept": dedup([source], target, DedupSettings()).documents_out}


def dedup(arguments: Namespace) -> Iterator[Row]:
    """Deduplication against datasketch, and its signatures against rensa."""
    documents = with_copies(arguments.count)
    source, target = write_documents(arguments.work / "in.jsonl.zst", documents), arguments.work / "out"
    signatures = {"signatures: rensa": partial(rensa_signatures, source)} if find_spec("rensa") else {}
    signatures["signatures: corpus.dedup"] = partial(our_signatures, source)
    whole = {
        "end to end: datasketch MinHashLSH, unverified": partial(datasketch_dedup, source),
        "end to end: corpus.dedup run, verified": partial(our_dedup, source, target),
    }
    for contenders in (signatures, whole):
        rows = compare("deduplication", contenders, arguments.rounds, len(documents), "documents", clock="cpu")
        yield from ({**row, "kept": row.get("kept")} for row in rows)


def recall(arguments: Namespace) -> Iterator[Row]:
    """The share of near duplicates that are found, by their similarity.

    Every second copy is wrapped at 72 columns, every fourth is also in capitals.
    """
    from corpus.dedup.__main__ import dedup
    from corpus.dedup.shingles import jaccard, normalised, shingles

    settings, documents = DedupSettings(), with_copies(arguments.count, [share / 1000 for share in range(2, 111)])
    for number, copy in enumerate(documents[4::5]):
        if number % 2:
            copy["text"] = fill(copy["text"].upper() if number % 4 == 3 else copy["text"], 72)
    source = write_documents(arguments.work / "in.jsonl.zst", documents)
    dedup([source], arguments.work / "out", settings)
    kept = {document["id"] for document in read_documents(arguments.work / "out/in.jsonl.zst")}
    removed = defaultdict[tuple[int, bool], list[bool]](list)
    for original, copy in zip(documents[3::5], documents[4::5], strict=False):
        sets = [shingles(normalised(document["text"]), settings) for document in (original, copy)]
        key = int(jaccard(*sets) * 20), "\n" in copy["text"]
        removed[key].append(not {original["id"], copy["id"]} <= kept)
    for (similarity, wrapped), pairs in sorted(removed.items()):
        if similarity / 20 >= settings.threshold:
            yield {
                "similarity from": similarity / 20,
                "the copy": "wrapped" if wrapped else "in one line",
                "pairs": len(pairs),
                "found, %": 100 * sum(pairs) / len(pairs),
            }


def _install(peer: Path) -> Path:
    python = peer / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", peer], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def _stages(commands: Mapping[str, Sequence[str | Path]]) -> Timed:
    """Run the commands of all stages; their CPU seconds are columns."""

    def run() -> dict[str, float | None]:
        taken = {
            stage: timed(partial(subprocess.run, command, stdout=subprocess.DEVNULL, check=True)).cpu
            for stage, command in commands.items()
        }
        return {f"{stage}, CPU s": taken.get(stage) for stage in STAGES}

    return run


def datatrove(arguments: Namespace) -> Iterator[Row]:
    """Deduplication against datatrove, both with defaults: CPU time by stage, found copies."""
    python, work = _install(arguments.peer), arguments.work
    documents = with_copies(arguments.count, SHARES)
    source = write_documents(work / "in/0000.jsonl.zst", documents)
    (work / "plain").mkdir()
    (work / "plain/0000.jsonl").write_bytes(b"".join(orjson.dumps(document) + b"\n" for document in documents))
    theirs = {stage: [python, "-c", _THEIRS, stage, work / "plain", work / "theirs"] for stage in STAGES}
    del theirs["verify"]
    command, folder = [sys.executable, "-m", "corpus.dedup"], ["--work", work / "work"]
    ours = {
        "signatures": [*command, "signatures", "--input", source, *folder],
        "bands, buckets": [*command, "bands", *folder, "--part", "0/1"],
        "verify": [*command, "verify", *folder, "--part", "0/1"],
        "clusters": [*command, "clusters", *folder],
        "filter": [*command, "filter", "--input", source, *folder, "--output-dir", work / "out"],
    }
    contenders = {"datatrove": partial(_stages, theirs), "corpus.dedup": partial(_stages, ours)}
    yield from compare("deduplication", contenders, 1, len(documents), "documents", clock="cpu")

    lines = [line for path in (work / "theirs/out").glob("*.jsonl") for line in path.read_bytes().splitlines()]
    kept = {
        "datatrove": {orjson.loads(line)["id"] for line in lines},
        "ours": {document["id"] for document in read_documents(work / "out/0000.jsonl.zst")},
    }
    for share in SHARES:
        copies = zip(documents[3::5], documents[4::5], strict=False)
        pairs = [{original["id"], copy["id"]} for original, copy in copies if copy["changed"] == share]
        yield {
            "changed words": f"{share:.0%}",
            "copies": len(pairs),
            **{
                f"found by {name}, %": 100 * sum(not pair <= ids for pair in pairs) / len(pairs)
                for name, ids in kept.items()
            },
        }
    yield {"kept of": len(documents), **{f"by {name}": len(ids) for name, ids in kept.items()}}
