"""The examples in docstrings, README and docs run as they stand, in a folder that holds the files they name."""

import ast
import contextlib
import gzip
import importlib
import io
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
import zstandard

from convert.targets.megatron import write_v3
from demo.articles import python_articles
from demo.build import build_site
from demo.serve import serve
from tests.conftest import ROOT
from tests.convert.encoded import SMALL, truth
from tests.convert.helpers import source_of
from tests.helpers import document, prose, write_shard
from tests.test_commands import PACKAGES

PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
CODE = ("common", "corpus", "training", "convert", "cluster", "report", "demo")
SKIPPED = {
    r".*(max_repeated_lines|extractors=\[article|gpt2_774m)": "tests/test_contributing.py runs it",
    r"python -m benchmarks\.": "takes minutes; tests/benchmarks runs the parts",
    r"python -m tests\.training\.parity": "takes minutes; tests/training/test_parity.py runs it",
    r"python -m training\.train --config config\.yaml --model tiny parallel\.tensor=1": "the fixture runs it",
    r"python -m demo$": "runs everything; tests/workflow/test_all.py does that",
    r"python -m demo\.serve --site \S+$": "serves until Ctrl-C; tests/demo/test_serve.py does that",
    r".*--resolve '\*=127\.0\.0\.1:8080'": "port 8080 may be taken; tests/corpus/scrape/test_main.py uses a free one",
    r"python -m corpus\.merge_index .*--shards 1000": "needs 1,000 shards; tests/corpus/test_merge_index.py has three",
    r"python -m corpus\.train_tokenizer .*(32000|8000)": "the demo's text is too short; the fixture trains 2,048",
    r"python -m cluster\.submit --config my\.yaml .*--wait": "needs Slurm; tests/slurm does that",
    r"python -m cluster\.submit --config config\.yaml": "two processes; tests/workflow/test_all.py starts them",
    r"python -m tests\.slurm\.lab": "needs Slurm; tests/slurm/test_lab.py does that",
    r"python -m cluster\.status results/lab": "needs Slurm; tests/slurm/test_training.py does that",
    r"python -m cluster\.logs": "needs a submitted job; tests/cluster/test_logs.py has some",
    r"python -m cluster\.job_end": "a batch script runs it; tests/cluster/test_job_end.py does",
    r"python -m convert\.from_megatron": "needs a new model; tests/convert/test_from_megatron.py has one",
    r"python -m demo\.build --output /tmp/site": "writes outside the folder; its twin runs",
    r"python -m training\.kernels build": "needs nvcc; tests/training/kernels/test_main.py has a stand-in",
    r"python -m training\.(probe|plan) --config run\.yaml": "needs GPUs; tests/training/test_probe.py has CPUs",
    r"python -m cluster\.autotune": "measures for minutes; tests/cluster/test_autotune.py does that",
    r"python -m corpus clean": "becomes another process; tests/common/test_verbs.py does that",
    r"torchrun (?!.*train\.iterations=300)": "another of them runs",
}
MADE = {"convert.merge_mp": "merged", "convert.to_megatron": "megatron-tp2", "corpus.tokenize": "tokens"}
VOCABULARY = 2048  # of the small demo run
"""What examples of a command write: they begin without it."""
OWN_PROCESS = (
    "training.train",
    "cluster.submit",
    "cluster.preflight",
    "training.probe",
)  # they set up process groups and signal handlers


def _commands(text: str) -> list[str]:
    """The commands in a text, without comments and the spaces that align them."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [line.strip() for line in lines if re.match(r" *(python -m|torchrun) ", line)]
    return [re.sub(r"\s+#\s.*$", "", command) for command in found]


def _documented() -> dict[str, list[str]]:
    """All commands by the file in which they stand."""
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    for path in sorted(path for package in CODE for path in (ROOT / package).rglob("*.py")):
        texts[str(path.relative_to(ROOT))] = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return {name: commands for name, text in texts.items() if (commands := _commands(text))}


DOCUMENTED = _documented()


def _skipped(command: str) -> bool:
    return any(re.match(pattern, command) for pattern in SKIPPED)


def _words(command: str) -> list[str]:
    """A command's words as a shell passes them on: names that match are filled in for a pattern."""
    words: list[str] = []
    for word in shlex.split(command):
        words += sorted(glob(word)) or [word]
    return words


def call(command: str) -> None:
    """Run `python -m MODULE …` in the current folder; fails with what it said when its exit code is not 0."""
    if "&&" in command:
        for part in command.split(" && "):
            if not _skipped(part):
                call(part)
        return
    words = _words(command)
    if words[0] == "torchrun" or words[2] in OWN_PROCESS:
        program = Path(sys.executable).with_name(words[0])
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([program, *words[1:]], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return
    _, _, module, *words = words
    main: Any = importlib.import_module(f"{module}.__main__" if module in PACKAGES else module).main
    try:
        code = main(words)
    except SystemExit as leave:
        code = leave.code
    assert not code, command


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a small demo run and the files that examples name, made by the commands themselves."""
    folder = tmp_path_factory.mktemp("workshop")
    for name in ("Snakefile", "workflow", "profiles", "configs", "slurm"):
        (folder / name).symlink_to(ROOT / name)
    site = folder / "results/demo/site"
    build_site(dict(list(python_articles().items())[:60]), site)
    urls = (site / "urls.txt").read_text().splitlines()[:60]
    with contextlib.chdir(folder), serve(site) as address:
        _write_inputs(urls, address)
        _run_the_steps()
        yield folder


def _write_inputs(urls: list[str], address: str) -> None:
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["scrape"]["resolve"] = {"*": address}
    config["sources"] = [{"path": "texts"}]
    small = {"n_layer": 1, "n_head": 2, "n_embd": 16, "seq_len": 32, "vocab_size": VOCABULARY}
    config["models"]["tiny"]["model"] |= small
    config["train_tokenizer"] = {"vocab_size": VOCABULARY}
    config["models"]["tiny"]["train"] |= {"iterations": 400, "micro_batch_size": 1, "global_batch_size": 1}
    Path("config.yaml").write_text(yaml.safe_dump(config))
    mine = yaml.safe_load((ROOT / "configs/openwebtext.yaml").read_text()) | {"run": "results/mine"}
    mine["scrape"] = {"contact": "crawler@my-university.example", "resolve": {"*": address}, "host_delay": 0}
    Path("my.yaml").write_text(yaml.safe_dump(mine))

    listed = "".join(f"{url}\n" for url in urls).encode()
    submissions = (orjson.dumps({"url": url, "score": 9, "over_18": False, "is_self": False}) for url in urls)
    for name in ("more", "data/urls", "texts", "wiki/AA"):
        Path(name).mkdir(parents=True)
    Path("urls.txt").write_bytes(listed)
    Path("data/urls/list.txt").write_bytes(listed)
    Path("more/list.xz").write_bytes(lzma.compress(listed))
    Path("RS_2019-12.zst").write_bytes(zstandard.compress(b"\n".join(submissions)))
    Path("dump.jsonl.gz").write_bytes(gzip.compress(orjson.dumps({"content": prose(1)})))
    Path("texts/one.txt").write_text(prose(2))
    Path("wiki/AA/wiki_00").write_text(f'<doc id="1" url="http://w.example/1" title="One">\n{prose(3)}\n</doc>\n')
    Path("book.txt").write_text(prose(4))
    write_shard(Path("poems.jsonl"), [document(5, prose(5))])
    Path("wiki.test.tokens").write_text(f" = One = \n \n {prose(6, 60)} \n")
    for name in ("lambada.jsonl", "lambada_test.jsonl"):
        Path(name).write_bytes(orjson.dumps({"text": "The value of the list is the value"}) + b"\n")
    Path("prompts.txt").write_text("The list of\nA string\n")


def _run_the_steps() -> None:
    """From the URLs to a merged model, in the demo's folders and under the names that single examples use."""
    pages = "pages/0000.jsonl.zst"
    call(f"python -m corpus.scrape --urls urls.txt --output {pages} --config config.yaml --archive raw.warc.gz")
    shutil.copy(pages, "pages.jsonl.zst")
    shutil.copy("raw.warc.gz", "CC-MAIN-1.warc.gz")
    call("python -m corpus.clean --input pages.jsonl.zst --output clean/0000.jsonl.zst")
    call("python -m corpus.dedup run --input clean/*.jsonl.zst --output-dir dedup")
    for name in ("dedup/0.jsonl.zst", "dedup/clean.jsonl.zst"):
        shutil.copy("dedup/0000.jsonl.zst", name)
    call("python -m corpus.dedup signatures --input clean/0000.jsonl.zst --output work/0000.signatures")
    for part in range(8):  # a phase reads the files of all parts
        call(f"python -m corpus.dedup bands --signatures work --part {part}/8 --output work/{part}.pairs")
    for part in range(8):
        call(
            f"python -m corpus.dedup verify --signatures work --pairs work --block {part}/8 --output work/{part}.edges"
        )
    run = "results/demo"
    words = f"--input dedup/0000.jsonl.zst --output-dir {run}/tokenizer --vocab-size {VOCABULARY}"
    call(f"python -m corpus.train_tokenizer {words}")
    for shard in ("0000", "0001"):
        words = f"--input dedup/0000.jsonl.zst --output-prefix tokens/{shard} --config config.yaml"
        call(f"python -m corpus.tokenize {words}")
    call(f"python -m corpus.merge_index --inputs tokens/ --output-prefix {run}/dataset/corpus_text_document")
    for suffix in ("bin", "idx", "json"):
        shutil.copy(f"{run}/dataset/corpus_text_document.{suffix}", f"data/books_text_document.{suffix}")
    call("python -m training.train --config config.yaml --model tiny parallel.tensor=1")
    for name in ("results/demo/merged/tiny", "merged/tiny"):
        call(f"python -m convert.merge_mp --checkpoint {run}/models/tiny --output {name}")
    small = replace(SMALL, n_layer=1, n_head=2, n_embd=8, n_inner=32, vocab_size=50257)
    Path("megatron/gpt2-345m").mkdir(parents=True)
    write_v3(source_of(truth(small), small), Path("megatron/gpt2-345m"), tp=2, pp=1)
    call("python -m convert.merge_mp --checkpoint megatron/gpt2-345m --output merged/gpt2-345m")
    for name in ("models", "merged"):
        shutil.copytree(f"{run}/{name}/tiny", f"results/mine/{name}/gpt2_345m")
    shutil.copytree(f"{run}/merged/tiny", f"{run}/merged/small")
    shutil.copytree(f"{run}/dataset", "results/mine/dataset")
    for folder in ("results/demo/pages", "results/mine/pages"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(pages, folder)


@pytest.fixture
def copy(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the prepared folder, which is the current folder while the test runs."""
    folder = tmp_path / "copy"
    shutil.copytree(workshop, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("The list of\nstop\n"))  # prompts from the terminal
    return folder


@pytest.mark.parametrize("name", [name for name, found in DOCUMENTED.items() if not all(map(_skipped, found))])
def test_the_examples_run(name: str, copy: Path) -> None:
    for module, made in MADE.items():
        if any(f"-m {module} " in command and not _skipped(command) for command in DOCUMENTED[name]):
            shutil.rmtree(made, ignore_errors=True)
    for command in DOCUMENTED[name]:
        if " curl " in command and not shutil.which("curl"):
            pytest.skip("curl is not installed")
        if not _skipped(command):
            call(command)


def test_every_reason_to_skip_is_needed() -> None:
    commands = [part for found in DOCUMENTED.values() for command in found for part in command.split(" && ")]
    for pattern in SKIPPED:
        assert any(re.match(pattern, command) for command in commands), pattern
