import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


def test_a_full_disk_is_an_error_and_no_bus_error(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from corpus.dedup.clusters import Forest
try:
    Forest(10**6, Path(sys.argv[1]))
except OSError as error:
    print(error.strerror, error.filename)
"""
    mount = 'mount -t tmpfs -o size=1m tmpfs "$1" || exit 99; exec "$0" -c "$2" "$1"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, sys.executable, str(tmp_path), program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode in (1, 99):
        pytest.skip(f"no disk of one's own here: {done.stderr}")
    assert (done.returncode, done.stdout) == (0, f"No space left on device {tmp_path}\n"), done.stderr
