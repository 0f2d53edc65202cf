"""A text from the training data is given its document, its URL and its first iteration."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from common.errors import InputError
from tests.helpers import run_main
from tests.training.helpers import Capsys, Patch
from training.generate import main, source_lines
from training.inference import sampling
from training.sources import open_sources
from training.trace import Trace

PROMPT = "The"
SIZE = 12  # tokens of the document that the text repeats


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy: what finds sources keeps indexes of the dataset and of its order."""
    return Path(shutil.copytree(finished_run / "results/x", tmp_path / "x"))


@pytest.fixture
def merged(run: Path) -> Path:
    return run / "merged/tiny"


@pytest.fixture
def trace(run: Path) -> Trace:
    return Trace(run / "models/tiny")


def words(trace: Trace, document: int, first: int) -> str:
    corpus = trace.samples[0].corpus
    start = int(corpus.starts[document]) + first
    return trace.tokenizer.decode(corpus.tokens[start : start + SIZE].tolist())


def first_read(trace: Trace, document: int, first: int, last: int) -> int | None:
    """The first iteration with a sample that holds all SIZE tokens, by looking at every step."""
    for iteration in range(1, last + 1):
        for piece in trace.step(iteration):
            begin, end = piece.span.first, piece.span.first + piece.span.tokens
            if piece.document.number == document and begin <= first and first + SIZE <= end:
                return iteration
    return None


@pytest.fixture
def text(trace: Trace, monkeypatch: Patch) -> str:
    """What the model writes now: 12 tokens that iteration 5 was the first to read, and 12 that a
    validation document alone has.
    """
    corpus, part = trace.samples[0].corpus, trace.samples[0].part
    trained = trace.tokenizer.decode(corpus.tokens[: corpus.starts[part.stop]].tolist())
    places = [(piece.document.number, piece.span.first) for piece in trace.step(5) if piece.span.tokens >= SIZE]
    read = [words(trace, *place) for place in places if first_read(trace, *place, 5) == 5]
    (first, *_) = (words for words in read if trained.count(words) == 1)
    places = [(number, at) for number in range(part.stop, corpus.documents) for at in range(0, 500, SIZE)]
    (second, *_) = (found for place in places if (found := words(trace, *place)) not in trained)
    text = f"{first} qq xx zz{second} qq"

    def generate(
        _model: Any, _tokenizer: Any, prompts: list[str], _options: Any, samples: int, *_: Any
    ) -> Iterator[str]:
        yield from (prompt + text for prompt in prompts for _ in range(samples))

    monkeypatch.setattr(sampling, "generate", generate)
    return text


@pytest.mark.parametrize("form", ["merged folder", "model folder", "checkpoint"])
def test_a_verbatim_text_has_its_url_and_first_iteration(
    form: str, merged: Path, trace: Trace, text: str, tmp_path: Path, capsys: Capsys
) -> None:
    checkpoint = {"merged folder": merged, "model folder": trace.folder}.get(form, trace.folder / "iter_0000004")
    (tmp_path / "prompts.jsonl").write_bytes(orjson.dumps({"prompt": PROMPT}))
    asked = ("--checkpoint", checkpoint, "--sources", "--prompts", tmp_path / "prompts.jsonl", "--samples", 2)
    assert run_main(main, *asked) == 0
    results = [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["text"] for result in results] == [PROMPT + text] * 2 and results[0]["seed"] != results[1]["seed"]
    found = results[1]
    assert (len(trace.tokenizer.encode(text)) - 7, 10) == (found["eight_grams"], found["verbatim"])
    read, unread = sorted(found["sources"], key=lambda span: span["at"])
    for span, part in ((read, "train"), (unread, "valid")):
        assert (span["part"], span["tokens"], span["text"] in text) == (part, SIZE, True)
        assert span["url"] == trace.tables[0][span["number"]].url and span["url"].startswith("http")
        assert words(trace, span["number"], span["first"]) == span["text"]
    last = 4 if form == "checkpoint" else trace.trained
    expected = first_read(trace, read["number"], read["first"], last)
    assert read["iteration"] == expected and unread["iteration"] is None
    assert (expected is None) == (form == "checkpoint"), "iteration 5 is the first that read it, and 4 did not"


def test_sources_stand_below_each_text(merged: Path, trace: Trace, text: str, capsys: Capsys) -> None:
    asked = ("--checkpoint", merged, "--prompt", PROMPT, "--samples", 2)
    assert run_main(main, *asked, "--sources") == 0
    grams = len(trace.tokenizer.encode(text)) - 7
    below = source_lines(open_sources(merged).of(text))
    assert below[0] == f"--- sources: 10 of {grams} 8-grams stand in the training data ({10 / grams:.1%})"
    for read in ("first read in iteration 5", "never read (valid part)"):
        assert any(": http" in line and line.endswith(read) for line in below[1:])
    blocks = capsys.readouterr().out.split("--- sample ")[1:]
    assert [block.splitlines()[-len(below) :] for block in blocks] == [below, below]
    assert run_main(main, *asked) == 0
    assert "--- sources" not in capsys.readouterr().out


def test_without_urls_a_span_has_its_document_and_a_folder_that_moved_names_its_model(
    merged: Path, text: str, tmp_path: Path, capsys: Capsys, monkeypatch: Patch
) -> None:
    run = shutil.copytree(merged.parents[1], tmp_path / "run", ignore=shutil.ignore_patterns("*.docs", "*.ngrams"))
    moved = (run / "merged/tiny").rename(tmp_path / "moved")
    with pytest.raises(InputError, match=f"{moved}: .* name it: --sources MODEL"):
        open_sources(moved)
    monkeypatch.setattr("training.sources.os.access", lambda *_: False)  # the dataset's folder cannot be written
    assert run_main(main, "--checkpoint", moved, "--prompt", PROMPT, "--sources", run / "models/tiny") == 0
    prefix = run / "dataset/corpus_text_document"
    assert re.search(rf": document 1\d of {prefix}, never read \(valid part\)\n", capsys.readouterr().out)
    assert (run / "models/tiny/trace/0.ngrams").is_file() and not list(prefix.parent.glob("*.ngrams"))
