"""The tutorials run as they stand, one after the other in one folder, each in a shell of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

TUTORIALS = ("own_text", "finetune", "from_megatron", "compare_filters")


@pytest.mark.slow
def test_the_tutorials_run_as_they_stand(tmp_path: Path) -> None:
    for name in ("Snakefile", "workflow", "profiles", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()  # the test's own environment is active
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for name in TUTORIALS:
        page = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
        for file, text in re.findall(r"Save this as `(\w+\.yaml)`.*?```yaml\n(.*?)```", page, re.DOTALL):
            (tmp_path / file).write_text(text, encoding="utf-8")
        commands = "".join(re.findall(r"^```sh\n(.*?)```", page, re.MULTILINE | re.DOTALL))
        done = subprocess.run(
            ["bash", "-e"],
            cwd=tmp_path,
            input=commands,
            env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
