"""Which near duplicates are found, and deduplication beside datatrove's, stage by stage.

    python -m benchmarks.corpus recall
    python -m benchmarks.corpus datatrove --peer FOLDER

FOLDER is a virtual environment of datatrove's own; it is made and filled if it does not exist.
"""

import random
import subprocess
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill

import orjson

from benchmarks.harness import Row
from benchmarks.inputs import with_copies, write_documents
from common.errors import JobError
from common.files import Document, read_documents
from common.settings import DedupSettings

PACKAGES = ("datatrove==0.10.1", "spacy", "regex", "orjson", "tokenizers", "nltk", "xxhash<4")
SHARES = (0.01, 0.03, 0.05, 0.10, 0.20)
STAGES = ("signatures", "bands, buckets", "verify", "clusters", "filter")

# one stage in its own process, with its defaults: 14 buckets of 8 hashes over 5-grams of words, English
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

# a command in a small process of its own: a child starts with the peak memory of its parent
_MEASURED = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss)
sys.exit(code)
"""


def planted(count: int) -> tuple[list[Document], dict[str, tuple[str, float]]]:
    """Documents of 3,000 characters; of one in five an original and the share of its words that were replaced."""
    chance, documents, copied = random.Random(2), with_copies(count), dict[str, tuple[str, float]]()
    for number in range(4, count, 5):
        original, share = documents[number - 1], chance.choice(SHARES)
        words = documents[number - 2]["text"].split()
        text = [chance.choice(words) if chance.random() < share else word for word in original["text"].split(" ")]
        documents[number]["text"] = " ".join(text)
        copied[documents[number]["id"]] = original["id"], share
    return documents, copied


def _timed(label: str, command: Sequence[str | Path]) -> tuple[float, float]:
    """CPU seconds and peak memory in MB of a command. Raises JobError if it fails."""
    done = subprocess.run([sys.executable, "-c", _MEASURED, *command], capture_output=True, text=True)
    if done.returncode:
        raise JobError(f"{label}: {done.stderr.strip()[-500:]}")
    seconds, kilobytes = map(float, done.stdout.split())
    return seconds, kilobytes / 1024


def _install(peer: Path) -> Path:
    python = peer / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", peer], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def near_pairs(count: int) -> list[Document]:
    """Pairs of neighbours: a document of 3,000 characters, and a copy with up to 11 % of its words replaced.

    Every second copy is wrapped at 72 columns, every fourth also in capitals.
    """
    chance, found = random.Random(3), list[Document]()
    originals = [one for number, one in enumerate(with_copies(count)) if number % 5 != 4]
    for number, original in enumerate(originals):
        share, words = chance.uniform(0.002, 0.11), originals[number - 1]["text"].split()
        text = " ".join(chance.choice(words) if chance.random() < share else word for word in original["text"].split())
        text = fill(text, 72) if number % 2 else text
        copy = {"id": f"c{number:015x}", "text": text.upper() if number % 4 == 3 else text}
        found += [original, copy]
    return found


def recall(arguments: Namespace) -> Iterator[Row]:
    """The share of near duplicates that are found, by their similarity."""
    from corpus.dedup.__main__ import dedup
    from corpus.dedup.shingles import jaccard, normalised, shingles

    settings, documents = DedupSettings(), near_pairs(arguments.count)
    source = write_documents(arguments.work / "in.jsonl.zst", documents)
    dedup([source], arguments.work / "out", settings)
    kept = {one["id"] for one in read_documents(arguments.work / "out/in.jsonl.zst")}
    found = defaultdict[tuple[int, bool], list[bool]](list)
    for original, copy in zip(documents[::2], documents[1::2], strict=True):
        sets = [shingles(normalised(one["text"]), settings) for one in (original, copy)]
        key = int(jaccard(*sets) * 20), "\n" in copy["text"]
        found[key].append(not {original["id"], copy["id"]} <= kept)
    for (similarity, wrapped), pairs in sorted(found.items()):
        if similarity / 20 >= settings.threshold:
            yield {
                "similarity from": similarity / 20,
                "the copy": "wrapped" if wrapped else "in one line",
                "pairs": len(pairs),
                "found, %": 100 * sum(pairs) / len(pairs),
            }


def datatrove(arguments: Namespace) -> Iterator[Row]:
    """Deduplication beside datatrove at each side's defaults: CPU time of each stage, and found copies."""
    python, work = _install(arguments.peer), arguments.work
    documents, copied = planted(arguments.count)
    source = write_documents(work / "in/0000.jsonl.zst", documents)
    (work / "plain").mkdir()
    (work / "plain/0000.jsonl").write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in documents))
    dedup, folder = [sys.executable, "-m", "corpus.dedup"], ["--work", work / "work"]
    ours = {
        "signatures": ["signatures", "--input", source, *folder],
        "bands, buckets": ["bands", *folder, "--part", "0/1"],
        "verify": ["verify", *folder, "--part", "0/1"],
        "clusters": ["clusters", *folder],
        "filter": ["filter", "--input", source, *folder, "--output-dir", work / "out"],
    }
    total = [0.0, 0.0]
    for stage in STAGES:
        theirs: tuple[float | None, float | None] = (None, None)
        if stage != "verify":
            theirs = _timed(stage, [python, "-c", _THEIRS, stage, work / "plain", work / "theirs"])
        own = _timed(stage, [*dedup, *ours[stage]])
        total = [total[0] + (theirs[0] or 0), total[1] + own[0]]
        yield {"stage": stage, "datatrove, CPU s": theirs[0], "MB": theirs[1], "ours, CPU s": own[0], "our MB": own[1]}
    yield {"stage": "all", "datatrove, CPU s": total[0], "MB": None, "ours, CPU s": total[1], "our MB": None}

    kept = {one["id"] for one in read_documents(work / "out/0000.jsonl.zst")}
    lines = [line for path in (work / "theirs/out").glob("*.jsonl") for line in path.read_bytes().splitlines()]
    their_kept = {orjson.loads(line)["id"] for line in lines}
    pairs = defaultdict[float, list[set[str]]](list)
    for name, (original, share) in copied.items():
        pairs[share].append({name, original})
    for share, found in sorted(pairs.items()):
        yield {
            "changed words": f"{share:.0%}",
            "copies": len(found),
            "found by datatrove, %": 100 * sum(not pair <= their_kept for pair in found) / len(found),
            "found by ours, %": 100 * sum(not pair <= kept for pair in found) / len(found),
        }
    yield {"kept of": len(documents), "by datatrove": len(their_kept), "by ours": len(kept)}
