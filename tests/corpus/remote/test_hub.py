"""Datasets of the Hugging Face Hub."""

from pathlib import Path

import pytest

from tests.corpus.remote.fetching import fetch, fetched
from tests.corpus.remote.servers import Answer, Hub, body, cut, status
from tests.helpers import assert_one_line_error

DATA = "hf://datasets/me/texts/data"


def in_data(hub: Hub, commit: str = "") -> dict[str, bytes]:
    files = hub.commits[commit or hub.main]
    return {name.removeprefix("data/"): data for name, data in files.items() if name.startswith("data/")}


def test_files_in_lfs_and_in_git_are_fetched_from_the_commit_that_was_listed(tmp_path: Path, hub: Hub) -> None:
    first, expected = hub.main, in_data(hub)
    assert fetch(tmp_path, f"{DATA}/*", options=("--list",)).returncode == 0
    hub.push({name: data + b"changed" for name, data in hub.commits[first].items()} | {"data/more.parquet": b"more"})
    done = fetch(tmp_path, f"{DATA}/*")
    assert done.returncode == 0, done
    assert fetched(tmp_path) == expected
    assert all(first in request.path for request in hub.server.requests if "resolve/" in request.path)
    assert fetch(tmp_path, f"{DATA}/*", options=("--renew",)).returncode == 0
    assert fetched(tmp_path) == in_data(hub)


def test_a_revision_can_be_named(tmp_path: Path, hub: Hub) -> None:
    first = hub.main
    hub.push({"data/other.parquet": b"other"})
    done = fetch(tmp_path, f"hf://datasets/me/texts@{first}/data/*.parquet")
    assert done.returncode == 0, done
    assert fetched(tmp_path) == {name: data for name, data in in_data(hub, first).items() if name.endswith("parquet")}


def test_a_revision_with_slashes_is_written_with_2f(tmp_path: Path, hub: Hub) -> None:
    """As for HfFileSystem; datasets made by scripts have their Parquet files at such a one."""
    hub.commits["refs/convert/parquet"] = {"default/train/0.parquet": b"PAR1"}
    done = fetch(tmp_path, "hf://datasets/me/texts@refs%2Fconvert%2Fparquet/default/*/*.parquet")
    assert done.returncode == 0, done
    assert fetched(tmp_path) == {"train/0.parquet": b"PAR1"}


def test_a_page_of_a_proxy_in_place_of_the_hub_is_one_line(tmp_path: Path, hub: Hub) -> None:
    hub.server.respond = lambda request: Answer(b"<html>Please log in").but(content_type="text/html")
    done = fetch(tmp_path, f"{DATA}/*")
    assert done.returncode in (2, 75) and len(done.stderr.splitlines()) == 1 and "me/texts" in done.stderr, done


def test_names_of_any_characters_are_kept(tmp_path: Path, hub: Hub) -> None:
    names = [
        f"{name}.{kind}" for name in ("a b", "100%25", "ü 日本", "q?&=#", "'\"", "+") for kind in ("parquet", "txt")
    ]
    hub.push({f"data/{name}": name.encode() for name in names})
    done = fetch(tmp_path, f"{DATA}/*")
    assert done.returncode == 0, done
    assert fetched(tmp_path) == {name: name.encode() for name in names}


def test_a_long_folder_comes_in_pages_and_other_folders_are_not_listed(tmp_path: Path, hub: Hub) -> None:
    many = {f"data/{n:03}.jsonl": b"%d" % n for n in range(60)}
    hub.push({**many, "other/a/b.jsonl": b"", "data/deep/c.jsonl": b""})
    hub.page_size = 25
    assert fetch(tmp_path, f"{DATA}/*.jsonl").returncode == 0
    assert fetched(tmp_path) == {name.removeprefix("data/"): data for name, data in many.items()}
    trees = [request.path for request in hub.server.requests if "/tree/" in request.path]
    assert not any("other" in path or "deep" in path for path in trees)
    assert len([path for path in trees if "/data?" in path]) == 3


def test_the_token_goes_to_the_hub_and_not_to_its_cdn(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_right"
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    done = fetch(tmp_path / "out", f"{DATA}/*")
    assert done.returncode == 0, done
    assert fetched(tmp_path / "out") == in_data(hub) and len(hub.cdn.asked()) == 3
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text("machine 127.0.0.1 login me password netrc-password\n")
    netrc.chmod(0o600)
    assert fetch(tmp_path / "again", f"{DATA}/*").returncode == 0  # the token is preferred
    assert {request.headers.get("authorization") for request in hub.server.requests} == {"Bearer hf_right"}
    assert not any("authorization" in request.headers for request in hub.cdn.requests)


@pytest.mark.parametrize("token", ["", "hf_wrong"])
def test_a_private_dataset_without_the_right_token_is_one_line(
    token: str, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_right"
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    done = fetch(tmp_path, f"{DATA}/*")
    assert_one_line_error(done, "me/texts", "HF_TOKEN")
    assert "hf_wrong" not in done.stdout + done.stderr


@pytest.mark.parametrize("path", ["me/nothing/*", "me/texts@no-such/data/*", "me/texts/nowhere/*", "me/texts/no.txt"])
def test_a_dataset_a_revision_or_a_folder_that_does_not_exist_is_one_line(path: str, tmp_path: Path, hub: Hub) -> None:
    assert_one_line_error(
        fetch(tmp_path, f"hf://datasets/{path}"), path.removesuffix("/*").removesuffix("/data").rpartition("/")[2]
    )


def test_a_gated_dataset_is_one_line(tmp_path: Path, hub: Hub) -> None:
    hub.gated = True
    done = fetch(tmp_path, f"{DATA}/*", settings=("fetch.concurrency=1",))
    assert done.returncode == 2 and "me/texts" in done.stderr and "HF_TOKEN" in done.stderr
    assert "Traceback" not in done.stderr and list(fetched(tmp_path)) == []


def test_a_folder_stands_for_its_tables_or_for_all_files_below_it(tmp_path: Path, hub: Hub) -> None:
    assert fetch(tmp_path / "tables", "hf://datasets/me/texts").returncode == 0
    assert sorted(fetched(tmp_path / "tables")) == [f"data/part-{n}.parquet" for n in range(3)]
    hub.push({"texts/a.jsonl": b"a", "texts/in/b.jsonl": b"b", "texts/.hidden": b"", "other.jsonl": b""})
    for folder, end in (("a", ""), ("b", "/")):
        assert fetch(tmp_path / folder, f"hf://datasets/me/texts/texts{end}").returncode == 0
        names = {name.removeprefix("texts/"): data for name, data in fetched(tmp_path / folder).items()}
        assert names == {"a.jsonl": b"a", "in/b.jsonl": b"b"}


def test_a_finished_fetch_needs_no_network(tmp_path: Path, hub: Hub) -> None:
    assert fetch(tmp_path, f"{DATA}/*").returncode == 0
    hub.server.requests.clear()
    assert fetch(tmp_path, f"{DATA}/*").returncode == 0 and hub.server.requests == []


def test_bytes_with_another_checksum_are_never_kept(tmp_path: Path, hub: Hub) -> None:
    name = "data/part-1.parquet"
    wrong = hub.commits[hub.main][name].replace(b"PAR1", b"PAR2", 1)
    hub.faults[name] = [body(wrong)]  # once
    assert fetch(tmp_path, f"{DATA}/*").returncode == 0
    assert fetched(tmp_path) == in_data(hub)
    hub.faults[name] = [body(wrong)] * 50
    done = fetch(tmp_path / "again", f"{DATA}/*", settings=("fetch.retries=2",))
    assert done.returncode != 0 and "part-1.parquet" in done.stderr.splitlines()[-1]
    assert "part-1.parquet" not in fetched(tmp_path / "again") and "Traceback" not in done.stderr


def test_a_cut_download_goes_on_at_the_cdn_with_a_new_signed_url(tmp_path: Path, hub: Hub) -> None:
    hub.push({"data/big.parquet": b"0123456789" * 5000})
    hub.faults["data/big.parquet"] = [cut(20_000), status(503), cut(100)]
    done = fetch(tmp_path, f"{DATA}/*")
    assert done.returncode == 0, done
    assert fetched(tmp_path) == in_data(hub)
    assert len([path for path in hub.server.asked() if "/resolve/" in path]) == 4
    assert hub.cdn.sent < 50_000 + 12 * 4096


def test_what_another_program_left_in_the_temporary_file_is_found_by_the_checksum(tmp_path: Path, hub: Hub) -> None:
    assert fetch(tmp_path, f"{DATA}/*", options=("--list",)).returncode == 0
    (listing,) = tmp_path.glob("*.json")
    names = ("part-0.parquet", "notes.jsonl")
    for name, left in zip(names, (bytes(900), b"x" * 10_000), strict=True):  # zeros of a power cut; more than there is
        path = tmp_path / listing.stem / f"{name}.tmp"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(left)
    done = fetch(tmp_path, f"{DATA}/*")
    assert done.returncode == 0, done
    assert fetched(tmp_path) == in_data(hub)


def test_models_and_other_words_are_no_datasets(tmp_path: Path) -> None:
    for url in ("hf://me/texts/*", "hf://models/me/texts/*", "hf://datasets/me", "hf://datasets//texts/*"):
        assert_one_line_error(fetch(tmp_path, url), url)
