"""Outages: runs while the network is down."""

import asyncio
from pathlib import Path

import pytest

from common.errors import OutageError
from tests import rude_server as rude
from tests.corpus.scrape.shards import DOWN, URLS, Shard, article, fresh
from tests.helpers import assert_one_line_error, called
from tests.rude_server import Server, reply, rude_server

pytestmark = pytest.mark.usefixtures("quick_extraction")


def test_no_response_from_any_host_is_an_outage_and_leaves_no_file(tmp_path: Path, server: Server) -> None:
    shard = Shard(tmp_path)
    for count in (1, len(URLS)):
        with pytest.raises(OutageError):
            shard.run(DOWN, URLS[:count], allow_empty=True, archive=True)
        assert [path.name for path in shard.folder.iterdir()] == ["urls.txt"]
    result = called("corpus.scrape", *shard.arguments(DOWN), "--allow-empty", "--archive", shard.warc)
    assert_one_line_error(result, "29 URLs of 14 sites", "(25 connection, 4 host_parked)", code=75)
    shard.run(server.address)
    assert shard.bytes() == fresh(tmp_path, server)


def test_a_network_that_is_down_during_a_changed_list_is_an_outage(tmp_path: Path, server: Server) -> None:
    shard = Shard(tmp_path)
    shard.run(server.address)
    before, settled = shard.bytes(), shard.journal.read_bytes()
    for more in ([f"http://new{n}.example/" for n in range(9)], ["http://site0.example/new"]):
        with pytest.raises(OutageError):
            shard.run(DOWN, [*URLS, *more], allow_empty=True)
        assert shard.bytes() == before and shard.journal.read_bytes() == settled
    dead = [f"http://dead.example/{n}" for n in range(3)]
    with pytest.raises(OutageError):
        shard.run(DOWN, [*URLS, *dead])
    assert shard.run(server.address, [*URLS, *dead[:1]]).reasons["http_404"] == 2


def test_a_network_that_goes_down_during_a_run_makes_no_page_a_failure(tmp_path: Path) -> None:
    names = [f"a{n}.example/{k}" for n in range(4) for k in ("robots.txt", 0, 1, 2)]
    answered = 0

    async def while_it_lasts(writer: asyncio.StreamWriter) -> object:
        nonlocal answered
        answered += 1
        return await (reply(article(answered)) if answered < 9 else rude.reset)(writer)

    shard, urls = Shard(tmp_path), [f"http://{name}" for name in names if "robots" not in name]
    with rude_server(dict.fromkeys(names, while_it_lasts)) as server:
        with pytest.raises(OutageError):
            shard.run(server.address, urls)
        answered = -99
        stats = shard.run(server.address, urls)
    assert stats.documents_out == 12 and 0 < stats.extra["resumed"] <= 8
