"""What users get wrong: one line on stderr that names the key, file or number, and exit code 2."""

import contextlib
import shlex
from pathlib import Path

import numpy as np
import orjson
import pytest
import yaml
import zstandard

from corpus.index import IndexWriter, Meta
from tests.helpers import called, document, prose, write_shard

CLEAN = "corpus.clean --config config.yaml --input pages.jsonl.zst --output out.jsonl.zst"
TRAIN = "training.train --config config.yaml --model tiny"
MISTAKES = f"""
    corpus.clean --input pages.jsonl.zst                                            | --output
    {CLEAN} --worker 3                                                              | --workers
    corpus.clean --config tab.yaml --input pages.jsonl.zst --output out.jsonl.zst   | tab.yaml:3
    {CLEAN} clean.min_charcters=5                                                   | 'min_characters'
    {CLEAN} claen.min_characters=5                                                  | 'claen'...'clean'
    {CLEAN} clean.min_characters=few                                                | clean.min_characters: ...few
    {CLEAN} clean.language=xx                                                       | clean.language: 'xx'
    {CLEAN} clean.language                                                          | clean.language
    corpus.merge_index --inputs data/few --output-prefix out clean.language=de      | clean.language=de
    {TRAIN} model.n_head=3                                                          | n_embd 8...n_head 3
    {TRAIN} train.global_batch_size=7 train.micro_batch_size=2                      | global_batch_size 7...6 or 8
    {TRAIN}                                                                         | corpus_text_document.idx
    corpus.clean --input none.jsonl.zst --output out.jsonl.zst                      | none.jsonl.zst
    corpus.clean --input truncated.jsonl.zst --output out.jsonl.zst                 | truncated.jsonl.zst
    corpus.clean --input lines.jsonl.zst --output out.jsonl.zst                     | lines.jsonl.zst:2: ...1 of 2
    corpus.clean --input pages.jsonl.zst --output pages.jsonl.zst                   | pages.jsonl.zst
    corpus.clean --input short.jsonl.zst --output out.jsonl.zst                     | short.jsonl.zst: ...1 short
    corpus.scrape --urls urls.txt --output out.jsonl.zst                            | scrape.contact ...site.example
    corpus.dedup bands --work folder --part 0/2                                     | folder: ...signatures
    corpus.tokenize --input urls.txt --output-prefix out                            | urls.txt
    corpus.train_tokenizer --input short.jsonl.zst --output-dir o train_tokenizer.vocab_size=9999 | short...257
    corpus.merge_index --inputs data/cut --output-prefix out                        | data/cut.bin: 100...2000
    training.evaluate --checkpoint none --data data/few                             | none
    training.evaluate --checkpoint none --data urls.txt --max-samples 9             | --tasks
    training.plan --config config.yaml --model tiny --gpu H1000                     | 'H1000' ...'h100'
    convert.merge_mp --checkpoint folder --output out                               | folder/mp_rank_00
    convert.merge_mp --checkpoint folder --output data                              | data/cut.bin
    cluster.status none                                                             | none
    cluster.logs folder                                                             | folder
    workflow.report --run none --output out.html                                    | none
"""
CASES = [tuple(part.strip() for part in line.split(" | ")) for line in MISTAKES.strip().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the command lines name."""
    folder = tmp_path_factory.mktemp("messages")
    model = {"model": {"n_layer": 1, "n_head": 2, "n_embd": 8, "seq_len": 8}, "train": {"iterations": 5}}
    with contextlib.chdir(folder):
        for name in ("folder/mp_rank_00", "data"):
            Path(name).mkdir(parents=True)
        Path("config.yaml").write_text(yaml.safe_dump({"run": "x", "urls": ["urls.txt"], "models": {"tiny": model}}))
        Path("tab.yaml").write_text("run: x\nclean:\n\tmin_characters: 5\n")
        Path("urls.txt").write_text("http://site.example/\n")
        write_shard(Path("pages.jsonl.zst"), [document(1, prose(1))])
        write_shard(Path("short.jsonl.zst"), [document(1, "Too short.")])
        whole = Path("pages.jsonl.zst").read_bytes()
        Path("truncated.jsonl.zst").write_bytes(whole[: len(whole) // 2])
        good = orjson.dumps(document(1, prose(1)))
        Path("lines.jsonl.zst").write_bytes(zstandard.compress(good + b'\n{"text": 5}\n'))
        for name in ("few", "cut"):
            with IndexWriter(Path("data", name), np.uint16, Meta(vocab_size=50257, end_of_text=50256)) as writer:
                for _ in range(200):
                    writer.add_document(np.array([5, 6, 7, 8, 50256], np.uint16))
        with Path("data/cut.bin").open("r+b") as file:
            file.truncate(100)
    return folder


@pytest.mark.parametrize(("line", "named"), CASES)
def test_a_mistake_is_one_line_that_names_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, line: str, named: str
) -> None:
    monkeypatch.chdir(folder)
    result = called(*shlex.split(line))
    errors = [line for line in result.stderr.strip().splitlines() if not line.startswith("warning: ")]
    assert result.returncode == 2 and len(errors) == 1 and "error: " in errors[0], result.stderr
    assert all(part.strip() in errors[0] for part in named.split("...")), errors[0]
    assert len(errors[0]) < 420
    assert not [path for path in folder.iterdir() if path.name.startswith("out")]
