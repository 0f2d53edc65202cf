"""Names of remote files that could leave the folder, overwrite another file, or fit no disk."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

import pytest

from tests.conftest import ROOT
from tests.corpus.remote.conftest import Web
from tests.corpus.remote.fetching import DUMPS, HOST, arguments, at, fetch, fetched, listed
from tests.corpus.remote.servers import S3, Answer, Hub, Request, serving
from tests.helpers import assert_one_line_error

BAD = {
    "parent": "../escape.gz",
    "parent inside": "a/../../escape.gz",
    "here": "./here.gz",
    "absolute": "/tmp/escape.gz",
    "empty component": "a//b.gz",
    "zero byte": "a\0b.gz",
    "line feed": "a\nb.gz",
    "long": f"{'n' * 297}.gz",
    "long with .tmp": f"{'n' * 250}.gz",
}


@pytest.mark.parametrize("name", BAD.values(), ids=BAD)
def test_a_name_that_is_no_path_below_the_folder_is_refused_before_anything_is_fetched(
    name: str, tmp_path: Path, hub: Hub
) -> None:
    hub.push({f"x/{name}": b"bad", "x/good.gz": b"good"})
    folder = tmp_path / "run" / "fetch"
    assert_one_line_error(fetch(folder, "hf://datasets/me/texts/x/**"), "hf://datasets/me/texts/x/**")
    assert fetched(folder) == {} and not [path for path in hub.server.asked() if "/resolve/" in path]
    assert not list(tmp_path.rglob("*escape*")) and not Path("/tmp/escape.gz").exists()


def test_names_in_a_bucket_that_would_overwrite_each_other_are_refused(tmp_path: Path, s3: S3) -> None:
    s3.make_bucket("overwrite", {"x/a": b"file", "x/a/b": b"in folder"})
    assert_one_line_error(fetch(tmp_path, "s3://overwrite/x/**"), "'a'", "'a/'")


@pytest.mark.parametrize("names", [("A.gz", "a.gz"), ("in/a.gz", "IN/b.gz"), ("Ä.gz", "ä.gz")])
def test_names_that_differ_in_case_only_are_refused(names: tuple[str, str], tmp_path: Path, hub: Hub) -> None:
    hub.push({f"x/{name}": name.encode() for name in names})
    clash = [name if "/" not in name else name.partition("/")[0] for name in names]
    assert_one_line_error(fetch(tmp_path, "hf://datasets/me/texts/x/**"), *clash)
    assert fetched(tmp_path) == {}


def test_hidden_files_are_left_out_as_by_a_shell(tmp_path: Path, s3: S3) -> None:
    s3.make_bucket("hidden", {"x/.a.gz": b"hidden", "x/a.gz": b"a", ".x/a.gz": b"in a hidden folder"})
    assert fetch(tmp_path, "s3://hidden/*/*.gz").returncode == 0
    assert fetched(tmp_path) == {"x/a.gz": b"a"} or fetched(tmp_path) == {"a.gz": b"a"}


def test_a_file_named_like_the_temporary_one_of_another_is_left_out(tmp_path: Path, s3: S3) -> None:
    s3.make_bucket("temporary", {"x/a": b"a" * 50_000, "x/a.tmp": b"temporary"})
    done = fetch(tmp_path, "s3://temporary/x/*")
    assert done.returncode == 0, done
    assert fetched(tmp_path) == {"a": b"a" * 50_000}


def test_folders_that_never_end_are_one_line(tmp_path: Path) -> None:
    page = b"<a href='again/'>again</a><a href='1.gz'>1</a>"
    with serving(lambda request: Answer(page if request.path.endswith("/") else b"1")) as server:
        done = fetch(tmp_path, f"https://{HOST}/**/*.gz", settings=at(server))
        assert_one_line_error(done, HOST)
        assert len(server.requests) < 1000


@pytest.mark.parametrize(
    "link", ["..%2F..%2Fescape.gz", "%2e%2e/escape.gz", "%2Ftmp%2Fescape.gz", "a%00b.gz", "a%0Ab.gz"]
)
def test_links_with_encoded_slashes_and_dots_leave_no_folder(link: str, tmp_path: Path, web: Web) -> None:
    web.site.pages[f"{HOST}/dumps/"] = f"<a href='{link}'>x</a><a href='0.jsonl.gz'>y</a>".encode()
    folder = tmp_path / "run" / "fetch"
    fetch(folder, f"{DUMPS}/*.gz", settings=web.settings)
    assert [path for path in tmp_path.rglob("*escape*") if not path.is_relative_to(folder)] == []
    assert set(fetched(folder)) <= {"0.jsonl.gz"}


class Many:
    """A bucket of 100,000 objects, as S3 lists them: 1,000 per page."""

    COUNT = 100_000

    def __call__(self, request: Request) -> Answer:
        query = {key: values[0] for key, values in parse_qs(urlsplit(request.path).query).items()}
        if "list-type" not in query:  # whether there is such a bucket
            return Answer()
        start = int(query.get("continuation-token", 0))
        end = min(start + 1000, self.COUNT)
        entries = "".join(
            f"<Contents><Key>{escape(query['prefix'])}part-{n:06}.jsonl.zst</Key><LastModified>2026-11-29T16:02:00Z"
            f"</LastModified><ETag>&quot;{n:032x}&quot;</ETag><Size>{n}</Size></Contents>"
            for n in range(start, end)
        )
        more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{end}</NextContinuationToken>"
        answer = f"<ListBucketResult>{entries}{more if end < self.COUNT else ''}</ListBucketResult>"
        return Answer(answer.encode()).but(content_type="application/xml")


MEASURED = """
import sys
from corpus.fetch import main
from common.cli import run
code = run(main)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_100_000_names_are_listed_within_megabytes(tmp_path: Path, s3: S3) -> None:
    with serving(Many()) as server:
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, *arguments(tmp_path, "s3://many/x/*.zst", options=("--list",))],
            cwd=ROOT,
            env={**os.environ, "AWS_ENDPOINT_URL": f"http://{server.address}"},
            capture_output=True,
            text=True,
        )
        assert len(server.asked()) == 100
    assert done.returncode == 0 and listed(tmp_path)[-1] == "part-099999.jsonl.zst", done.stderr
    assert int(re.search(r"VmHWM:\s+(\d+) kB", done.stdout)[1]) < 300_000  # of which the libraries take 90,000
