import gzip
from pathlib import Path

import pytest

from benchmarks.extract import Score, overall, read_articles, score, standard_error
from common.files import write_json
from demo.pages import Host, page_html
from tests.conftest import Command
from tests.helpers import assert_one_line_error, prose

HOST = Host("one.example", "The One", "A site of sorts", ("Home", "Contact"), "main")


def write_articles(folder: Path, texts: dict[str, str]) -> Path:
    """A benchmark folder with the key and the gold text of each page."""
    (folder / "html").mkdir(parents=True)
    for key, text in texts.items():
        html = page_html(HOST, f"The title of {key}", text)
        (folder / "html" / f"{key}.html.gz").write_bytes(gzip.compress(html.encode()))
    truth = {key: {"url": f"https://one.example/{key}", "articleBody": text} for key, text in texts.items()}
    write_json(folder / "ground-truth.json", truth)
    return folder


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        ("a b c d e", "a b c d e", (1, 1)),
        ("a b c d e", "A b c d e", (1 / 2, 1 / 2)),  # case matters
        ("a b c d e", "a, b.\nc-d e!", (1, 1)),  # punctuation and white space do not matter
        ("a b c d e f", "a b c d x e f", (1 / 4, 1 / 3)),
        ("a b c d a b c d", "a b c d", (1, 1 / 5)),  # repetitions count
        ("a b", "a b", (1, 1)),  # a text of fewer than four words is one n-gram
        ("a b", "a b c", (0, 0)),
        ("a b c d", " \n", (None, 0)),
        ("", "a b c d", (0, None)),
    ],
)
def test_the_score_counts_word_4_grams_with_their_repetitions(
    gold: str, answer: str, expected: tuple[float | None, float | None]
) -> None:
    assert score(gold, answer) == Score(*expected)


def test_f1_is_made_of_the_means_and_an_empty_answer_has_no_precision() -> None:
    assert overall([Score(1.0, 1.0), Score(0.5, 1.0)]) == pytest.approx((2 * 0.75 / 1.75, 0.75, 1.0))
    assert overall([Score(1.0, 1.0), Score(None, 0.0)]) == pytest.approx((2 * 0.5 / 1.5, 1.0, 0.5))
    assert overall([Score(None, 0.0)]) == (0.0, 0.0, 0.0)


def test_the_standard_error_is_the_spread_over_samples_of_pages_and_always_the_same() -> None:
    scores = [Score(1.0, 1.0), Score(0.5, 0.5)] * 50
    assert standard_error(scores) == standard_error(scores) == pytest.approx(0.25 / 10, rel=0.2)
    assert standard_error(scores[::2]) == 0


def test_half_of_the_pages_is_held_out_whatever_the_others_are(tmp_path: Path) -> None:
    texts = {f"page{n}": prose(n, 20) for n in range(200)}
    articles = read_articles(write_articles(tmp_path / "all", texts))
    assert [article.key for article in articles] == sorted(texts)
    assert 70 < sum(article.held_out for article in articles) < 130
    few = read_articles(write_articles(tmp_path / "few", {key: texts[key] for key in sorted(texts)[:20]}))
    assert [article.held_out for article in few] == [article.held_out for article in articles[:20]]


def test_the_command_prints_a_row_for_each_extractor(tmp_path: Path, command: Command) -> None:
    texts = {f"page{n}": "\n\n".join(prose(10 * n + part, 60) for part in range(3)) for n in range(6)}
    result = command("benchmarks.corpus", "extract", "--articles", write_articles(tmp_path, texts))
    assert result.returncode == 0, result.stderr
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:]] for cells in _table(result.stdout)}
    assert rows["ours: trafilatura, newspaper3k"][0].startswith("1.000")
    assert float(rows["tags stripped"][1]) < 0.95 < float(rows["tags stripped"][2])  # precision, recall
    assert {"newspaper3k", "trafilatura", "trafilatura, fast", "ours: trafilatura"} < rows.keys()


def _table(output: str) -> list[list[str]]:
    return [line.split("|") for line in output.splitlines() if line.startswith("|")]


def test_a_folder_without_the_benchmark_is_named_with_its_cure(tmp_path: Path, command: Command) -> None:
    result = command("benchmarks.corpus", "extract", "--articles", tmp_path)
    assert_one_line_error(result, "ground-truth.json", "--articles", "article-extraction-benchmark")
