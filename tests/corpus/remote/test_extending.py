"""A run that extends another lists its sources again and takes what is new there."""

from pathlib import Path

from common.files import read_documents
from corpus import fetch, ingest
from tests.corpus.remote.conftest import Web
from tests.corpus.remote.fetching import HOST, called
from tests.helpers import assert_one_line_error, document, write_shard

URL = f"https://{HOST}/dumps/*.jsonl"


def test_what_the_earlier_run_has_fetched_is_left_out_and_what_has_changed_there_is_an_error(
    tmp_path: Path, web: Web
) -> None:
    def line(number: int) -> bytes:
        return write_shard(tmp_path / "x.jsonl", [document(number, f"text {number}")]).read_bytes()

    def config(name: str, base: str = "") -> list[str]:
        path = tmp_path / f"{name}.yaml"
        path.write_text(f"run: {tmp_path / name}\nbase: [{base}]\nsources: [{{path: '{URL}'}}]\n")
        return ["--config", str(path), *web.settings]

    def texts(name: str, known: list[str]) -> list[str]:
        shard = tmp_path / name / "ingest/0000.jsonl.zst"
        output = ["--output-dir", str(shard.parent), "--shards", "1", "--stats", str(shard.with_name("stats.json"))]
        assert (
            ingest.main([*config(name, known[0] if known else ""), *output, *(["--allow-empty"] if known else [])]) == 0
        )
        return [each["text"] for each in read_documents(shard)]

    web.site.files |= {f"{HOST}/dumps/1.jsonl": line(1)}
    stats = ["--stats", str(tmp_path / "one/fetch/stats.json")]
    assert fetch.main([*config("one"), *stats]) == 0 and texts("one", []) == ["text 1"]
    one = str(tmp_path / "one")
    assert fetch.main(config("none", one)) == 0 and texts("none", [one]) == [], "nothing is new"
    web.site.files |= {f"{HOST}/dumps/2.jsonl": line(2)}
    web.server.requests.clear()
    assert fetch.main(config("two", one)) == 0 and texts("two", [one]) == ["text 2"]
    assert f"{HOST}/dumps/1.jsonl" not in [each.path for each in web.server.requests if each.method == "GET"]
    web.site.files |= {f"{HOST}/dumps/1.jsonl": line(3) + line(4)}
    assert_one_line_error(called("corpus.fetch", *config("three", one)), "1.jsonl", f"since {one} has read it")
    assert not (tmp_path / "three/fetch").is_dir() or not list((tmp_path / "three/fetch").glob("*.json"))
