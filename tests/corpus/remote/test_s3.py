"""Buckets of S3."""

import hashlib
from pathlib import Path

import pytest

from tests.corpus.remote.fetching import fetch, fetched
from tests.corpus.remote.servers import S3
from tests.helpers import assert_one_line_error, called


def test_a_pattern_lists_only_the_folders_that_it_needs(tmp_path: Path, s3: S3) -> None:
    wanted = {f"dumps/{year}/x-{n}.gz": b"%d %d" % (year, n) for year in (2024, 2025) for n in range(3)}
    others = {"dumps/2024/y.gz": b"", "dumps/2024/deep/x-1.gz": b"", "other/2024/x-1.gz": b"", "dumps/x-1.gz": b""}
    s3.make_bucket("patterns", wanted | others | {"dumps/2024/": b"", "dumps/z/x.gz": b""})
    done = fetch(tmp_path, "s3://patterns/dumps/20*/x-*.gz")
    assert done.returncode == 0, done
    assert fetched(tmp_path) == {name.removeprefix("dumps/"): data for name, data in wanted.items()}
    listed = [request.path for request in s3.requests if "list-type=2" in request.path]
    assert listed and all("delimiter" in path for path in listed)
    assert not any("prefix=other" in path or "deep" in path or "dumps%2Fz" in path for path in listed)


def test_keys_of_any_characters_keep_their_names(tmp_path: Path, s3: S3) -> None:
    names = ["a b.gz", "plus+.gz", "100%25.gz", "ü 日本.gz", "q?&=#.gz", "'quote\".gz", "~tilde!*().gz"]
    s3.make_bucket("characters", {f"x/{name}": name.encode() for name in names})
    done = fetch(tmp_path, "s3://characters/x/*.gz")
    assert done.returncode == 0, done
    assert fetched(tmp_path) == {name: name.encode() for name in names}


def test_objects_in_parts_are_verified_whatever_their_part_size(tmp_path: Path, s3: S3) -> None:
    s3.make_bucket("parts", {})
    small, large = b"01234567" * (S3.PART // 8) + b"end", b"76543210" * (S3.PART // 4)
    s3.put_in_parts("parts", "small.gz", small)
    s3.put_in_parts("parts", "large.gz", large, S3.PART + 4321)
    s3.put_in_parts("parts", "one.gz", b"one part")
    done = fetch(tmp_path, "s3://parts/*.gz")
    assert done.returncode == 0, done
    digests = {name: hashlib.md5(data).hexdigest() for name, data in fetched(tmp_path).items()}
    expected = {"small.gz": small, "large.gz": large, "one.gz": b"one part"}
    assert digests == {name: hashlib.md5(data).hexdigest() for name, data in expected.items()}


def test_an_object_in_parts_of_different_sizes_is_fetched(tmp_path: Path, s3: S3) -> None:
    """As by programs that copy parts of other objects; three parts of the first's size would do."""
    data = b"01234567" * (S3.PART // 8 * 3) + b"end"
    s3.make_bucket("unequal", {})
    s3.put_in_parts("unequal", "a.gz", data, S3.PART + 1, S3.PART, S3.PART + 2)
    done = fetch(tmp_path, "s3://unequal/*.gz", settings=("fetch.retries=1",))
    assert done.returncode == 0, done
    assert fetched(tmp_path)["a.gz"] == data


def test_an_object_under_a_key_of_kms_is_fetched_though_its_etag_is_no_checksum(tmp_path: Path, s3: S3) -> None:
    s3.make_bucket("kms", {})
    s3.put_encrypted("kms", "secret.gz", b"secret" * 100)
    done = fetch(tmp_path, "s3://kms/*.gz")
    assert done.returncode == 0, done
    assert fetched(tmp_path) == {"secret.gz": b"secret" * 100}


def test_a_public_bucket_is_read_without_an_account(tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.make_bucket("public", {"a.gz": b"a"})
    s3.client.put_bucket_acl(Bucket="public", ACL="public-read")
    s3.client.put_object_acl(Bucket="public", Key="a.gz", ACL="public-read")
    config = tmp_path / "config.yaml"
    config.write_text(f"run: {tmp_path}/run\nsources: [{{path: 's3://public/*.gz', anonymous: true}}]\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    done = called("corpus.fetch", "--config", config)
    assert done.returncode == 0, done
    assert fetched(tmp_path / "run" / "fetch") == {"a.gz": b"a"}
    assert not any("authorization" in request.headers or "Signature" in request.path for request in s3.requests)
    s3.requests.clear()
    assert called("corpus.fetch", "--config", config).returncode == 0 and s3.requests == []


def test_an_object_that_changed_or_went_since_it_was_listed_is_refused(tmp_path: Path, s3: S3) -> None:
    s3.make_bucket("changes", {"a.gz": b"a" * 100, "b.gz": b"b" * 100})
    where = (tmp_path, "s3://changes/*.gz")
    assert fetch(*where, options=("--list",)).returncode == 0
    s3.client.put_object(Bucket="changes", Key="a.gz", Body=b"A" * 100)
    done = fetch(*where)
    assert_one_line_error(done, "a.gz", "--renew")
    assert fetched(tmp_path) == {"b.gz": b"b" * 100}
    s3.client.delete_object(Bucket="changes", Key="a.gz")
    assert_one_line_error(fetch(*where), "a.gz", "--renew")
    assert fetch(*where, options=("--renew",)).returncode == 0
    assert s3.asked().count("/changes/b.gz") == 1


def test_throttling_is_waited_for(tmp_path: Path, s3: S3) -> None:
    s3.make_bucket("slow-down", {"a.gz": b"a" * 100})
    assert fetch(tmp_path, "s3://slow-down/*.gz", options=("--list",)).returncode == 0
    s3.faults["/slow-down/a.gz"] = [503, 500]
    assert fetch(tmp_path, "s3://slow-down/*.gz").returncode == 0
    assert fetched(tmp_path) == {"a.gz": b"a" * 100}


def test_a_missing_bucket_and_one_without_access_are_one_line(tmp_path: Path, s3: S3) -> None:
    assert_one_line_error(fetch(tmp_path, "s3://no-such-bucket/*.gz"), "no-such-bucket")
    s3.make_bucket("refused", {"a.gz": b"a"})
    s3.faults["/refused"] = [403]
    assert_one_line_error(fetch(tmp_path, "s3://refused/*.gz"), "refused", "anonymous")


def test_without_an_account_the_line_says_what_to_do(tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.make_bucket("account", {"a.gz": b"a"})
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert_one_line_error(fetch(tmp_path, "s3://account/*.gz"), "anonymous")
    for url in ("s3:///x/*.gz", "s3://account"):
        assert_one_line_error(fetch(tmp_path, url), url)


@pytest.mark.parametrize("left", ["begun", "torn"])
def test_an_object_that_was_begun_is_finished_and_one_that_was_torn_is_fetched_again(
    left: str, tmp_path: Path, s3: S3
) -> None:
    data = bytes(range(256)) * 400
    s3.make_bucket(f"resumed-{left}", {"a.gz": data})
    where = (tmp_path, f"s3://resumed-{left}/*.gz")
    assert fetch(*where, options=("--list",)).returncode == 0
    (listing,) = tmp_path.glob("*.json")
    part = tmp_path / listing.stem / "a.gz.tmp"
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(data[:50_000] if left == "begun" else bytes(50_000))  # zeros of a power cut
    s3.requests.clear()
    assert fetch(*where).returncode == 0
    assert fetched(tmp_path) == {"a.gz": data}
    ranges = [request.headers.get("range") for request in s3.requests if request.method == "GET"]
    assert ranges == ["bytes=50000-"] + [None] * (left == "torn")
