from collections import Counter
from pathlib import Path

from common.files import write_json
from common.settings import TokenizeSettings
from common.stats import Stats
from common.steps import CORPUS
from corpus.merge_index import merge_index
from corpus.tokenize import tokenize
from tests.helpers import assert_one_line_error, called, document, prose, write_shard
from tests.workflow.report.fake_run import finished_run
from workflow.report.__main__ import render
from workflow.report.corpus import corpus_figures, marked
from workflow.report.funnel import funnel


def test_the_funnel_sums_shards_in_the_order_of_the_steps(tmp_path: Path) -> None:
    folder = finished_run(tmp_path)
    steps = {step.name: step for step in funnel(folder)}
    assert [*steps] == [step.name for step in CORPUS if step.name in steps] and len(steps) == 8
    scrape, clean = steps["scrape"], steps["clean"]
    assert (scrape.documents_in, scrape.documents_out, scrape.bytes_out) == (200, 190, 171_000)
    assert scrape.reasons == [("timeout", 6), ("http_404", 4)]
    assert scrape.tokens is None and steps["merge_index"].tokens == 80_000
    assert [found["id"] for found in clean.examples["short"]] == ["0000.stats.json", "0001.stats.json"]
    assert steps["decontaminate"].evaluation_sets == {"lambada": {"hits": 3, "documents": 2}}
    found = corpus_figures(folder, [*steps.values()])
    assert found.languages == [("en", 180), ("de", 12)]
    assert found.lengths == [("256", 94, 84), ("1 Ki", 96, 86)]
    assert found.clusters == [("1", 300), ("2", 4), ("4 to 7", 1), ("8 to 15", 1)]


def test_the_report_counts_the_shards_of_the_configuration_that_is_named(tmp_path: Path) -> None:
    folder, output = finished_run(tmp_path / "run"), tmp_path / "report.html"
    arguments = ("--run", folder, "--output", output, "--config", folder / "config.yaml")
    for shards, reasons in (("shards=2", "6 timeout, 4 http_404"), ("shards=1", "3 timeout, 2 http_404")):
        assert called("workflow.report", *arguments, shards).returncode == 0
        page = output.read_text(encoding="utf-8")
        assert reasons in page and shards.replace("=", ": ") in page


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
    first, second, output = finished_run(tmp_path / "a"), finished_run(tmp_path / "b"), tmp_path / "compared.html"
    for run, language in ((first, "en"), (second, "de")):
        (run / "config.yaml").write_text(f"run: {run}\nurls: [urls.txt]\nshards: 2\nclean: {{language: {language}}}\n")
    stats = Stats("scrape", 100, 90, reasons=Counter(timeout=3, http_404=2, http_500=5))
    stats.finish(second / "pages/0001.stats.json")
    write_json(second / "evaluation/tiny.json", {"loss": 4.4, "perplexity": 81.5, "tokens": 4096})
    assert called("workflow.report", "--run", first, "--compare", second, "--output", output).returncode == 0
    page = output.read_text(encoding="utf-8")
    rows = [
        ("configuration", "clean.language", "en", "de", "", ""),
        ("scrape", "pages kept", "190", "185", "-5", "-2.6%"),
        ("scrape", "dropped: http_500", "0", "5", "+5", ""),
        ("tiny", "evaluated loss", "4.51", "4.4", "-0.11", "-2.4%"),
    ]
    for section, key, *cells in rows:
        line = "".join(f"<td>{cell}</td>" for cell in cells)
        assert f'<th scope="row">{section}</th><td class="words">{key}</td>{line}' in page, line
    assert "dropped: timeout" not in page and "a: tiny training" in page and "b: tiny training" in page


def test_the_words_that_differ_between_near_duplicates_are_marked() -> None:
    one, two = {"text": "the <b> cat\nsat  there today"}, {"text": "the <b> dog\nsat there"}
    assert marked(one, two) == "the &lt;b&gt; <mark>cat\n</mark>sat  there <mark>today</mark>"
    assert marked(two, one) == "the &lt;b&gt; <mark>dog\n</mark>sat there"
    assert marked({"id": "a"}, one) == ""


def test_the_models_of_a_run_that_trained_none_are_named(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", models=())
    assert "No model was trained" not in render(run)
    model = "{model: {n_layer: 1, n_head: 1, n_embd: 8}, train: {iterations: 1}}"
    with (run / "config.yaml").open("a") as config:
        config.write(f"models: {{small: {model}, large: {model}}}\n")
    assert "No model was trained; configured: small, large." in render(run)


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    (tmp_path / "empty").mkdir()
    for name in ("none", "empty"):
        assert_one_line_error(called("workflow.report", "--run", str(tmp_path / name), "--output", str(output)), name)
    assert_one_line_error(
        called("workflow.report", "--run", str(tmp_path), "--output", str(output), "shards=1"), "shards=1"
    )
    assert not output.exists()
