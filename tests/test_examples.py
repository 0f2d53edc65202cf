"""The examples in docstrings, README and docs run as they stand, in a folder with their files."""

import argparse
import ast
import contextlib
import gzip
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from common.commands import COMMANDS
from convert.targets.megatron import write_v3
from tests.conftest import ROOT
from tests.convert.encoded import SMALL, truth
from tests.convert.helpers import source_of
from tests.helpers import called, document, main_of, prose, run_python, write_shard
from workflow.demo.serve import serve

TUTORIALS = ("own_text", "finetune", "from_megatron", "compare_filters")
"""Pages that run one after the other in one folder, each in a shell of its own."""
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
CODE = ("common", "corpus", "training", "convert", "cluster", "workflow")
SKIPPED = {
    r".*(filters=\[repeated_lines|extractors=\[article|jokes\.fortune|gpt2_774m)": "tests/test_contributing.py runs it",
    r"python -m benchmarks\.": "takes minutes; tests/benchmarks runs the parts",
    r"python -m tests\.training\.parity": "takes minutes; tests/training/test_parity.py runs it",
    r"python -m training\.train --config config\.yaml --model tiny parallel\.tensor=1": "the fixture trained it",
    r"python -m training\.train .*--name": "a variable of a loop; tests/training/test_train.py trains one",
    r"python -m workflow.demo$": "runs everything; tests/workflow/test_all.py does that",
    r"python -m workflow.demo\.serve --site \S+$": "serves until Ctrl-C; tests/workflow/demo/test_serve.py does that",
    r".*scrape\.resolve=.*127\.0\.0\.1:8080": "8080 may be taken; tests/corpus/scrape/test_main.py uses a free port",
    r"python -m corpus\.fetch": "needs a network; tests/corpus/remote has servers here",
    r"python -m corpus\.merge_index .*--shards 1000": "needs 1,000 shards; tests/corpus/test_merge_index.py has three",
    r"python -m corpus\.train_tokenizer .*(32000|8000)": "too little text; tests/corpus/test_train_tokenizer.py",
    r"python -m cluster\.submit --config my\.yaml .*--(wait|grow)": "needs Slurm; tests/slurm does that",
    r"python -m cluster\.submit --config config\.yaml": "two processes; tests/workflow/test_all.py starts them",
    r"python -m cluster\.status results/lab": "needs Slurm; tests/slurm/test_training.py does that",
    r"python -m cluster\.logs": "needs a submitted job; tests/cluster/test_local.py has some",
    r"python -m cluster\.job_end": "a batch script runs it; tests/cluster/test_job_end.py does",
    r"python -m convert\.from_megatron": "needs a new model; tests/convert/test_from_megatron.py has one",
    r"python -m workflow.demo\.build": "takes seconds; tests/workflow/demo/test_build.py runs it",
    r"python -m training\.kernels build": "needs nvcc; tests/training/kernels/test_library.py has a stand-in",
    r"python -m cluster\.preflight": "two processes; tests/training/launch/test_preflight.py starts them",
    r"python -m cluster\.autotune": "measures for minutes; tests/cluster/test_autotune.py does that",
    r"python -m corpus\.blacklist .*(xz|RS_)": "tests/corpus/test_blacklist.py has dumps",
    r"python -m training\.evaluate .*--tasks": "needs lm_eval; tests/training/evaluation/test_harness.py has tasks",
    r"python -m workflow\.provenance\.trace .*--(url|domain|ids) ": "other pages; test_trace.py has some",
    r"python -m corpus\.dedup (signatures|bands|verify|clusters|filter)": "tests/corpus/dedup/test_main.py does it",
    r"python -m workflow.demo\.serve .*-- curl": "curl may be absent; test_serve.py runs another command",
    r"torchrun (?!.*train\.iterations=300)": "another of them runs",
}
OWN_PROCESS = ("training.train", "cluster.submit")
"""They set up process groups and signal handlers."""
SMALLER = {
    "iter_0000400": "iter_0000008",
    "train.iterations=300": "train.iterations=13",
    "--workers 8": "--workers 2",
}
"""What the small run in the folder needs instead."""


SHARED = ("results", "megatron", "merged")
"""Folders that the commands of all pages use."""


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


class _Parsed(Exception):
    """The options were parsed."""


def call(command: str) -> None:
    """Run `python -m MODULE …` in the current folder; fails with its errors."""
    for full, small in SMALLER.items():
        command = command.replace(full, small)
    for part in command.split(" && "):
        if _skipped(part):
            continue
        words = [name for word in shlex.split(part) for name in sorted(glob(word)) or [word]]  # as a shell does
        if words[0] == "torchrun" or words[2] in OWN_PROCESS:
            program, environment = Path(sys.executable).with_name(words[0]), {**os.environ, "PYTHONPATH": str(ROOT)}
            done = subprocess.run([program, *words[1:]], env=environment, capture_output=True, text=True)
        else:
            if words[2].startswith("convert.") and "--output" in words:
                shutil.rmtree(words[words.index("--output") + 1], ignore_errors=True)
            done = called(*words[2:])
        if done.returncode:
            raise RuntimeError(done.stderr)


def _workshop(finished: Path, address: str) -> None:
    """Fill the current folder with a finished run, results/demo, and the examples' files."""
    for name in ("Snakefile", "workflow", "profiles", "configs", "slurm"):
        Path(name).symlink_to(ROOT / name)
    run = Path("results/demo")
    shutil.copytree(finished / "results/x", run)
    urls = (finished / "site/urls.txt").read_text().splitlines()[:12]
    config = yaml.safe_load((finished / "config.yaml").read_text()) | {"run": "results/demo"}
    scrape = {"contact": "crawler@my-university.example", "resolve": {"*": address}, "host_delay": 0}
    config |= {"scrape": scrape, "sources": [{"path": "texts"}]}
    mine = yaml.safe_load((ROOT / "configs/openwebtext.yaml").read_text()) | {"run": "results/mine", "scrape": scrape}
    for file, content in (("config.yaml", config), ("my.yaml", mine)):
        Path(file).write_text(yaml.safe_dump(content))
    for name in "data/urls texts wiki/AA pages clean dedup parquet megatron/gpt2-345m merged".split():
        Path(name).mkdir(parents=True)
    listed = "".join(f"{url}\n" for url in urls).encode()
    files = {
        **dict.fromkeys(("urls.txt", "data/urls/list.txt"), listed),
        "dump.jsonl.gz": gzip.compress(orjson.dumps({"content": prose(1)})),
        "texts/one.txt": prose(2).encode(),
        "wiki/AA/wiki_00": f'<doc id="1" url="http://w.example/1" title="One">\n{prose(3)}\n</doc>\n'.encode(),
        "book.txt": prose(4).encode(),
        **dict.fromkeys(("lambada.jsonl", "set.jsonl"), b'{"text": "The value of the list is the value"}\n'),
        "prompts.txt": b"The list of\nA string\n",
        "takedown.txt": urls[0].encode(),
    }
    for name, data in files.items():
        Path(name).write_bytes(data)
    write_shard(Path("poems.jsonl"), [document(5, prose(5))])
    call("python -m corpus.scrape --urls urls.txt --output pages.jsonl.zst --config config.yaml --archive raw.warc.gz")
    Path("pages.jsonl.zst.settings.json").unlink()  # *.json are other files in an example
    shutil.copy("raw.warc.gz", "CC-MAIN-1.warc.gz")
    shutil.copy("pages.jsonl.zst", "pages/0000.jsonl.zst")
    for name in ("clean/0000", "dedup/0000", "dedup/0", "dedup/clean"):
        shutil.copy(run / name.split("/")[0] / "0000.jsonl.zst", f"{name}.jsonl.zst")
    shutil.copytree(run / "tokens", "tokens")
    run_python("docs/formats.md", "# Shards as Parquet")
    for suffix in ("bin", "idx", "json"):
        shutil.copy(run / f"dataset/corpus_text_document.{suffix}", f"data/books_text_document.{suffix}")
    small = replace(SMALL, n_layer=1, n_head=2, n_embd=8, n_inner=32, vocab_size=50257)
    write_v3(source_of(truth(small), small), Path("megatron/gpt2-345m"), tp=2, pp=1)
    for name in ("models", "merged"):
        shutil.copytree(run / name / "tiny", f"results/mine/{name}/gpt2_345m")
    shutil.copytree(run / "merged/tiny", run / "merged/small")
    for name in ("pages", "dataset"):
        shutil.copytree(run / name, f"results/mine/{name}")


@pytest.mark.slow
def test_the_examples_run(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, seen, prepared = [], set[str](), tmp_path / "prepared"
    prepared.mkdir()
    with serve(finished_run / "site") as address:
        with contextlib.chdir(prepared):
            _workshop(finished_run, address)
        for number, (page, commands) in enumerate(DOCUMENTED.items()):
            if Path(page).stem in TUTORIALS:
                continue
            folder, ignored = tmp_path / str(number), shutil.ignore_patterns(*SHARED)
            shutil.copytree(prepared, folder, symlinks=True, ignore=ignored)
            for name in SHARED:
                if any(" workflow.provenance.remove " in command for command in commands):  # it changes the run
                    shutil.copytree(prepared / name, folder / name, symlinks=True)
                else:
                    (folder / name).symlink_to(prepared / name)
            monkeypatch.chdir(folder)
            for command in commands:
                cheap = " corpus." in command  # and they follow each other in a page
                if (command in seen and not cheap) or _skipped(command):
                    continue
                seen.add(command)
                monkeypatch.setattr(sys, "stdin", io.StringIO("The list of\nstop\n"))  # prompts from the terminal
                try:
                    call(command)
                except Exception as error:
                    failed.append(f"{page}: {command}: {error}")
    assert not failed, "\n".join(failed)


def test_every_documented_command_has_options_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of SKIPPED, too, each pattern of which some command needs."""
    parts = [part for found in DOCUMENTED.values() for command in found for part in command.split(" && ")]
    assert [pattern for pattern in SKIPPED if not any(re.match(pattern, part) for part in parts)] == []
    real = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        raise _Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    words = [shlex.split(re.split(r" [|>&]|; ", part)[0]) for part in parts]
    checked = [
        (module, options)
        for program, _, module, *options in words
        if program == "python" and module in COMMANDS.values()
    ]
    assert len(checked) > 60
    for module, options in checked:
        with pytest.raises(SystemExit if "--help" in options else _Parsed):
            main_of(module)(options)
            pytest.fail(f"{module}: {options}")


@pytest.mark.slow
def test_the_tutorials_run_as_they_stand(tmp_path: Path) -> None:
    for name in ("Snakefile", "workflow", "profiles", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()  # the test's own environment is active
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for name in TUTORIALS:
        page = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
        for file, text in re.findall(r"Save this as `(\w+\.yaml)`.*?```yaml\n(.*?)```", page, re.DOTALL):
            (tmp_path / file).write_text(text, encoding="utf-8")
        commands = "".join(re.findall(r"^```sh\n(.*?)```", page, re.MULTILINE | re.DOTALL))
        done = subprocess.run(
            ["bash", "-e"],
            cwd=tmp_path,
            input=commands,
            env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
