"""The stores of `servers` are what the libraries that read real ones take them for."""

import contextlib
import hashlib
import http.client
import urllib.request
from pathlib import Path

import boto3
import pytest
from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, RevisionNotFoundError

from tests.corpus.remote.servers import (
    S3,
    Hub,
    Server,
    Site,
    chunked,
    cut,
    git_sha1,
    longer,
    nginx_page,
    no_head,
    running,
    serving,
    whole,
)

FILES = {"README.md": b"# A dataset\n", "data/a b.parquet": b"PAR1" * 5000, "data/deep/x.jsonl": b'{"text": "x"}\n' * 9}


def test_huggingface_hub_lists_and_downloads_from_the_hub(tmp_path: Path) -> None:
    hub = Hub("me/texts", page_size=1)
    first = hub.push(FILES)
    second = hub.push(FILES | {"new.txt": b"new"})
    with running(hub):
        server, cdn = hub.server, hub.cdn
        api = HfApi(endpoint=f"http://{server.address}", token="a-token")
        assert api.repo_info("me/texts", repo_type="dataset").sha == second
        assert api.repo_info("me/texts", repo_type="dataset", revision=first).sha == first
        every = {entry.path: entry for entry in api.list_repo_tree("me/texts", repo_type="dataset", recursive=True)}
        assert sorted(every) == sorted([*FILES, "new.txt", "data", "data/deep"])
        assert every["data/a b.parquet"].lfs.sha256 == hashlib.sha256(FILES["data/a b.parquet"]).hexdigest()
        assert every["README.md"].blob_id == git_sha1(b"# A dataset\n") == "5c2e38798064bf7f6f5e2ed9f65eafad56bb6cce"
        inside = api.list_repo_tree("me/texts", "data", repo_type="dataset", revision=first)
        assert sorted(entry.path for entry in inside) == ["data/a b.parquet", "data/deep"]
        info = api.get_paths_info("me/texts", ["README.md", "data", "none"], repo_type="dataset")
        assert [entry.path for entry in info] == ["README.md", "data"] and info[0] == every["README.md"]
        for name, data in FILES.items():
            where = {"endpoint": f"http://{server.address}", "cache_dir": tmp_path, "token": "a-token"}
            path = hf_hub_download("me/texts", name, repo_type="dataset", revision=first, **where)
            assert Path(path).read_bytes() == data
        assert cdn.asked() == [f"localhost:{cdn.server_port}/repos/{every['data/a b.parquet'].lfs.sha256}"]
        with pytest.raises(RevisionNotFoundError):
            api.repo_info("me/texts", repo_type="dataset", revision="0" * 40)
        with pytest.raises(EntryNotFoundError):
            list(api.list_repo_tree("me/texts", "nowhere", repo_type="dataset"))


def test_a_private_and_a_gated_dataset_are_refused_as_by_the_hub() -> None:
    hub = Hub("me/texts", token="right")
    hub.push(FILES)
    with running(hub):
        right, wrong = (HfApi(endpoint=f"http://{hub.server.address}", token=token) for token in ("right", "wrong"))
        assert right.repo_info("me/texts", repo_type="dataset").private
        with pytest.raises(HfHubHTTPError, match="401"):
            wrong.repo_info("me/texts", repo_type="dataset")
        hub.gated = True
        assert list(right.list_repo_tree("me/texts", repo_type="dataset"))
        with pytest.raises(GatedRepoError):
            get_hf_file_metadata(f"http://{hub.server.address}/datasets/me/texts/resolve/main/README.md", token="right")
        with pytest.raises(HfHubHTTPError, match="404"):
            right.repo_info("me/other", repo_type="dataset")


def test_boto3_finds_the_s3_with_parts_and_encrypted_objects(s3: S3) -> None:
    s3.make_bucket("servers", {"a/b c+d.txt": b"x"})
    s3.put_in_parts("servers", "big", b"y" * (S3.PART + 1))
    s3.put_encrypted("servers", "secret", b"z")
    client = boto3.client("s3")
    listed = {entry["Key"]: entry["ETag"].strip('"') for entry in client.list_objects_v2(Bucket="servers")["Contents"]}
    assert listed["a/b c+d.txt"] == hashlib.md5(b"x").hexdigest()
    parts = b"".join(hashlib.md5(part).digest() for part in (b"y" * S3.PART, b"y"))
    assert listed["big"] == f"{hashlib.md5(parts).hexdigest()}-2"
    assert client.head_object(Bucket="servers", Key="big", PartNumber=1)["ContentLength"] == S3.PART
    encrypted = client.head_object(Bucket="servers", Key="secret")
    assert encrypted["ServerSideEncryption"] == "aws:kms" and hashlib.md5(b"z").hexdigest() not in encrypted["ETag"]
    s3.faults["/servers/big"] = [503]
    url = client.generate_presigned_url("get_object", Params={"Bucket": "servers", "Key": "big"})
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(url)
    asked = urllib.request.Request(url, headers={"Range": f"bytes={S3.PART}-"})
    with urllib.request.urlopen(asked) as response:
        assert response.status == 206 and response.read() == b"y"
    assert s3.asked() == ["/servers", "/servers/big", "/servers/big"]
    client.close()


def get(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, header fields and body of a path at `a.example`."""
    connection = http.client.HTTPConnection(server.address)
    fields = {"Host": "a.example"} | {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=fields)
    with contextlib.closing(connection), connection.getresponse() as response:
        try:
            data = response.read()
        except http.client.IncompleteRead as error:
            data = error.partial + b" and no more"
        return response.status, {name.lower(): value for name, value in response.getheaders()}, data


def test_a_site_serves_parts_pages_and_its_faults() -> None:
    site = Site({"a.example/dumps/a b.gz": b"0123456789", "a.example/dumps/in/c.gz": b"c"})
    with serving(site) as server:
        path = "/dumps/a%20b.gz"
        _, head, data = get(server, path)
        assert data == b"0123456789"
        assert get(server, path, Range="bytes=8-")[::2] == (206, b"89")
        assert get(server, path, Range="bytes=8-", If_Range='"other"')[::2] == (200, b"0123456789")
        assert get(server, path, Range="bytes=8-", If_Range=head["etag"])[::2] == (206, b"89")
        assert get(server, path, If_Match='"other"')[0] == 412 and get(server, path, Range="bytes=10-")[0] == 416
        assert get(server, "/dumps")[:2][1]["location"] == "/dumps/"
        for page in (site.page, nginx_page):
            site.page = page
            listed = get(server, "/dumps/")[2]
            assert b'href="a%20b.gz"' in listed and b'href="in/"' in listed and b"c.gz" not in listed
        site.faults["a.example/dumps/a b.gz"] = [cut(4), longer(3), chunked, whole, cut(4, reset=True), cut(-1)]
        assert get(server, path)[2] == b"0123 and no more" and get(server, path)[2] == b"0123456789 and no more"
        assert get(server, path)[2] == b"0123456789" and get(server, path, Range="bytes=8-")[0] == 200
        with pytest.raises(ConnectionError):
            get(server, path)
        with pytest.raises(ConnectionError):
            get(server, path)
        site.always["a.example/dumps/a b.gz"] = no_head
        assert get(server, path, "HEAD")[0] == 405 and get(server, path)[0] == 200
        assert server.asked("HEAD") == ["a.example/dumps/a b.gz"]
