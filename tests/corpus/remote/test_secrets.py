"""Accounts, tokens and signed URLs stay where they are."""

import os
from pathlib import Path

import pytest

from tests.corpus.remote.conftest import Web
from tests.corpus.remote.fetching import DUMPS, HOST, fetch, fetched
from tests.corpus.remote.servers import S3, Hub, body, cut, moved, status
from tests.helpers import assert_one_line_error, called

SECRETS = ("hf_secret_token", "the-secret-of-aws", "netrc-password", "Signature=", "signed-", "AWSAccessKeyId=")


def hidden(folder: Path, *outputs: str) -> bool:
    """Whether no secret is in the output, nor in the name or bytes of a file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    texts = [*outputs, *(f"{path}" for path in files), *(path.read_bytes().decode("latin-1") for path in files)]
    return not any(secret in text for secret in SECRETS for text in texts)


@pytest.mark.parametrize("fault", [None, status(403), status(503), status(404), cut(10), body(b"PAR2" * 500)])
def test_tokens_and_signed_urls_are_written_nowhere(
    fault: object, tmp_path: Path, hub: Hub, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = f"secrets-{abs(hash(str(tmp_path)))}"
    s3.make_bucket(bucket, {"a.gz": b"a", "b.gz": b"b"})
    hub.token = "hf_secret_token"
    monkeypatch.setenv("HF_TOKEN", hub.token)
    settings, folder = ("fetch.retries=1",), tmp_path / "out"
    if fault:
        hub.faults["data/part-0.parquet"] = [fault] * 9
        s3.faults[f"/{bucket}/a.gz"] = [403] * 9
    for url in ("hf://datasets/me/texts/data/*", f"s3://{bucket}/*.gz"):
        for options in (("--list",), ()):
            done = fetch(folder, url, settings=settings, options=options)
            assert hidden(folder, done.stdout, done.stderr)
        assert fault or done.returncode == 0, done
    assert fetched(folder)["b.gz"] == b"b"


def test_passwords_of_netrc_go_to_their_host_alone(tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password netrc-password\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", os.fspath(netrc))
    here, there = web.server.address, f"localhost:{web.server.server_port}"
    web.site.files = {f"{here}/a.gz": b"a", f"{there}/b.gz": b"b"}
    web.site.always[f"{here}/b.gz"] = moved(f"http://{there}/b.gz")
    settings = ("blacklist.allow_private_hosts=true", "scrape.contact=me@here.example")
    done = fetch(tmp_path / "out", f"http://{here}/a.gz", f"http://{here}/b.gz", settings=settings)
    assert done.returncode == 0, done
    assert hidden(tmp_path / "out", done.stdout, done.stderr)
    assert {request.host: "authorization" in request.headers for request in web.server.requests} == {
        here: True,
        there: False,
    }


def test_a_password_in_a_url_of_the_configuration_is_not_shown(tmp_path: Path) -> None:
    for url in (f"https://me:netrc-password@{HOST}/*.gz", f"{DUMPS}/a.gz?Signature=1"):
        config = tmp_path / "config.yaml"
        config.write_text(f"run: {tmp_path}/run\nsources: [{{path: '{url}'}}]\n")
        done = called("corpus.fetch", "--config", config)
        assert_one_line_error(done, "sources", HOST)
        assert hidden(tmp_path / "run", done.stdout, done.stderr)
