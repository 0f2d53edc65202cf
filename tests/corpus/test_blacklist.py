from pathlib import Path

import orjson

from common.files import fingerprint, read_lines
from common.settings import BlacklistSettings
from corpus.blacklist import blacklist
from corpus.urls.hosts import registered_domain
from corpus.urls.url import parse_url

RULES = BlacklistSettings()
URLS = b"""
# a comment
http://example.org/first
http://example.org/picture.jpg
https://www.example.org/first?utm_source=list
http://other.example/second
not a url
"""


def test_kept_urls_come_out_in_input_order_and_rejects_name_their_reason(tmp_path: Path) -> None:
    source = tmp_path / "urls.txt"
    source.write_bytes(URLS)
    stats = blacklist([source], [tmp_path / "out.txt"], RULES, tmp_path / "rejects.jsonl")
    assert (tmp_path / "out.txt").read_text() == "http://example.org/first\nhttp://other.example/second\n"
    rejects = [orjson.loads(line) for line in read_lines(tmp_path / "rejects.jsonl")]
    assert [reject["reason"] for reject in rejects] == ["extension", "duplicate", "malformed"]
    assert (stats.documents_in, stats.documents_out) == (5, 2)
    assert dict(stats.reasons) == {"extension": 1, "duplicate": 1, "malformed": 1}
    assert stats.extra["inputs"] == {str(source): fingerprint(source)}


def test_a_domain_lives_in_one_shard_and_shards_keep_the_order_whatever_the_workers(tmp_path: Path) -> None:
    urls = [f"http://{sub}.site{number % 7}.example/page-{number}" for number in range(20_000) for sub in ("a", "b")]
    (tmp_path / "urls.txt").write_text("\n".join(urls))  # 1.3 MB: two blocks
    written = {}
    for workers in (1, 2):
        outputs = [tmp_path / str(workers) / f"{shard:04d}.txt" for shard in range(10)]
        rejects = tmp_path / f"{workers}.jsonl"
        assert blacklist([tmp_path / "urls.txt"], outputs, RULES, rejects, workers).documents_out == 40_000
        written[workers] = [path.read_bytes() for path in (*outputs, rejects)]
    assert written[1] == written[2]
    position, homes = {url: number for number, url in enumerate(urls)}, dict[str, set[Path]]()
    shards = {path: path.read_text().splitlines() for path in outputs}
    assert sorted(url for shard in shards.values() for url in shard) == sorted(urls)
    for path, shard in shards.items():
        assert shard == sorted(shard, key=position.__getitem__)
        for url in shard:
            homes.setdefault(registered_domain(parse_url(url).host), set()).add(path)
    assert len(homes) == 7 and all(len(home) == 1 for home in homes.values())
