from pathlib import Path

from common.files import write_json
from common.settings import TokenizeSettings
from common.stats import Stats
from corpus.merge_index import merge_index
from corpus.tokenize import tokenize
from tests.helpers import assert_one_line_error, called, document, prose, write_shard
from workflow.report.__main__ import render
from workflow.report.funnel import funnel


def run_folder(folder: Path) -> Path:
    """A run with two shards of pages and one trained model."""
    for shard in range(2):
        stats = Stats("scrape", documents_in=10, documents_out=7, bytes_out=100)
        stats.reasons.update({"timeout": 2, "http_404": 1})
        stats.finish(folder / "pages" / f"000{shard}.stats.json")
    Stats("merge_index", documents_in=5, documents_out=5, extra={"tokens": 1234}).finish(folder / "dataset/stats.json")
    model = folder / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "train.csv").write_text("iteration,lm_loss\n10,9.5\n20,7.5\n")
    (model / "valid.csv").write_text("iteration,loss\n20,7.9\n")
    write_json(folder / "evaluation" / "tiny.json", {"loss": 7.9, "perplexity": 2697.3, "tokens": 4096})
    (folder / "samples").mkdir()
    (folder / "samples" / "tiny.txt").write_text("The <b>value</b> of the")
    return folder


def test_the_funnel_sums_shards_in_the_order_of_the_steps(tmp_path: Path) -> None:
    scrape, merged = funnel(run_folder(tmp_path))
    assert (scrape.name, scrape.documents_in, scrape.documents_out, scrape.bytes_out) == ("scrape", 20, 14, 200)
    assert scrape.reasons == [("timeout", 4), ("http_404", 2)]
    assert scrape.tokens is None and merged.tokens == 1234


def test_the_report_shows_funnel_evaluation_and_sample_of_the_configuration_that_is_named(tmp_path: Path) -> None:
    folder, output = run_folder(tmp_path / "run"), tmp_path / "report.html"
    arguments = ("--run", str(folder), "--output", str(output))
    assert called("workflow.report", *arguments).returncode == 0
    page = output.read_text(encoding="utf-8")
    for part in ("4 timeout, 2 http_404", "<td>1,234</td>", "<svg", "perplexity 2697.30", "The &lt;b&gt;value"):
        assert part in page, part
    (tmp_path / "config.yaml").write_text(f"run: {folder}\nurls: [urls.txt]\nshards: 2\n")
    assert called("workflow.report", *arguments, "--config", str(tmp_path / "config.yaml"), "shards=1").returncode == 0
    page = output.read_text(encoding="utf-8")
    assert "2 timeout, 1 http_404" in page and "shards: 1" in page


def test_kept_documents_come_from_the_dataset_and_hosts_from_the_statistics(tmp_path: Path) -> None:
    documents = [
        document(number, f"Nr. {number} {prose(number)}", url=f"http://h{number % 2}.example/")
        for number in range(1, 26)
    ]
    shard = write_shard(tmp_path / "dedup/0000.jsonl.zst", documents)
    stats = tokenize([shard], tmp_path / "tokens/0000", TokenizeSettings())
    stats.finish(tmp_path / "tokens/0000.stats.json")
    assert stats.kept_by["host"]["h1.example"][0] == 13 and sum(stats.extra["token_lengths"].values()) == 25
    assert sum(size for _, size in stats.kept_by["host"].values()) == stats.bytes_out
    merge_index([tmp_path / "tokens/0000_text_document"], tmp_path / "dataset/corpus_text_document")
    (tmp_path / "config.yaml").write_text(f"run: {tmp_path}\nurls: [urls.txt]\n")
    page = render(tmp_path)
    shown = [each["id"] for each in documents if f'<pre tabindex="0">{each["text"][:40]}' in page]
    assert shown == sorted(shown) and shown == sorted(each["id"] for each in documents)[:20]


def test_runs_beside_each_other_show_what_differs(tmp_path: Path) -> None:
    first, second, output = run_folder(tmp_path / "a"), run_folder(tmp_path / "b"), tmp_path / "compared.html"
    for run, language in ((first, "en"), (second, "de")):
        (run / "config.yaml").write_text(f"run: {run}\nurls: [urls.txt]\nshards: 2\nclean: {{language: {language}}}\n")
    stats = Stats("scrape", documents_in=10, documents_out=5, bytes_out=100)
    stats.reasons.update({"timeout": 2, "http_500": 3})
    stats.finish(second / "pages/0001.stats.json")
    write_json(second / "evaluation/tiny.json", {"loss": 7.4, "perplexity": 1636.0, "tokens": 4096})
    assert (
        called("workflow.report", "--run", str(first), "--compare", str(second), "--output", str(output)).returncode
        == 0
    )
    page = output.read_text(encoding="utf-8")
    rows = [
        ("configuration", "clean.language", "en", "de", "", ""),
        ("scrape", "pages kept", "14", "12", "-2", "-14.3%"),
        ("scrape", "dropped: http_500", "0", "3", "+3", ""),
        ("tiny", "evaluated loss", "7.9", "7.4", "-0.5", "-6.3%"),
    ]
    for section, key, *cells in rows:
        line = f'<th scope="row">{section}</th><td class="words">{key}</td>' + "".join(
            f"<td>{cell}</td>" for cell in cells
        )
        assert line in page, line
    assert "dropped: timeout" not in page and "a: tiny training" in page and "b: tiny training" in page


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    (tmp_path / "empty").mkdir()
    for name in ("none", "empty"):
        assert_one_line_error(called("workflow.report", "--run", str(tmp_path / name), "--output", str(output)), name)
    assert_one_line_error(
        called("workflow.report", "--run", str(tmp_path), "--output", str(output), "shards=1"), "shards=1"
    )
    assert not output.exists()
