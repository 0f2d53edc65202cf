"""A run whose sources are URLs: planned without a network, fetched, fetched again if needed."""

from pathlib import Path

import orjson
import pytest

from common.files import read_documents
from corpus import fetch, ingest
from tests.corpus.remote.fetching import at
from tests.corpus.remote.servers import Site, serving
from tests.helpers import prose
from tests.workflow.pipeline import configure, planned, snakemake

HOST = "dumps.example"
URL = f"https://{HOST}/d/*.jsonl"


def lines(*numbers: int) -> bytes:
    rows = ({"text": prose(n), "url": f"https://site.example/{n}"} for n in numbers)
    return b"\n".join(map(orjson.dumps, rows))


def test_a_run_fetches_its_sources_and_says_before_what_it_would_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    site = Site({f"{HOST}/d/a.jsonl": lines(1, 2), f"{HOST}/d/b.jsonl": lines(3, 4, 5)})
    with serving(site) as server:
        scrape, source = {"resolve": {HOST: server.address}}, {"path": URL, "keep": False}
        configure(tmp_path, urls=[], site=None, scrape=scrape, sources=[source])
        _, said = planned(tmp_path, "ingest", "--quiet")
        assert f"note: {URL}: not listed yet" in said and server.requests == []
        assert fetch.main(["--config", "config.yaml", "--list"]) == 0
        done = snakemake(tmp_path, "ingest")
        assert done.returncode == 0, done.stderr
        shards = sorted((tmp_path / "results/x/ingest").glob("*.jsonl.zst"))
        assert not [path.name for path in (tmp_path / "results/x/fetch").rglob("*.jsonl*")], "ingest has read them"
        server.requests.clear()
        jobs, said = planned(tmp_path, "ingest", "--config", "shards=3")
        assert {"fetch", "ingest"} <= jobs.keys() and f"note: {URL}: 2 files, " in said and server.requests == []

        kept = ["run=kept", f"sources=[{{path: '{URL}'}}]", *at(server, HOST)]
        assert fetch.main(["--config", "config.yaml", *kept]) == 0
        assert ingest.main(["--config", "config.yaml", *kept, "--output-dir", "kept/ingest", "--shards", "2"]) == 0
        assert [path.read_bytes() for path in shards] == [
            Path("kept/ingest", path.name).read_bytes() for path in shards
        ]
        origins = {document["url"][-1]: document["origin"] for path in shards for document in read_documents(path)}
        assert origins == {
            n: f"https://{HOST}/d/{file}.jsonl:{line}"
            for n, file, line in (("1", "a", 1), ("2", "a", 2), ("3", "b", 1), ("4", "b", 2), ("5", "b", 3))
        }

        site.files[f"{HOST}/d/c.jsonl"] = lines(6)
        assert planned(tmp_path, "ingest")[0] == {}, "what is new there is not looked for"
        assert fetch.main(["--config", "config.yaml", "--renew"]) == 0
        jobs, said = planned(tmp_path, "ingest")
    assert jobs.keys() == {"fetch", "ingest", "total"} and "was listed again, with other files" in said, said
