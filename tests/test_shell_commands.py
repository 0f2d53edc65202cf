"""Commands of README and docs that are not `python -m` (see test_examples.py): planned, or named with a reason."""

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from demo.build import build_site
from tests.conftest import ROOT
from tests.helpers import document, prose, write_shard

PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
PROGRAMS = (
    "make", "snakemake", "git", "pip", "source", "cp", "touch", "zstd", "tmux", "nohup", "srun", "sbatch", "scontrol",
    "apt-get", "exit", "cd", "curl", "wget", "docker", "python -c", "python -m venv", "python3", "tensorboard", "dot",
)  # fmt: skip
NOT_RUN = {
    r"git clone|pip (install|download|wheel)|apt-get": "needs the network; test_wheel.py makes a wheel without it",
    r"tmux|nohup|srun|scontrol": "needs Slurm; tests/slurm has the commands in it",
    r"source|cd|exit": "changes the reader's shell",
    r"cp configs/openwebtext\.yaml": "the fixture does it",
    r"touch results/demo/models/tiny/stop": "tests/training/monitoring/test_stop.py does it",
    r"zstd -dc": "prints a compressed file; zstd may be absent",
    r"python -c '": "tests/workflow/test_real_pages.py and tests/convert load the same",
}
SNAKEMAKE = r"snakemake\b"
MAKE = r"make\b"


def _blocks(text: str) -> Iterator[str]:
    """The lines of code blocks that are no configuration, diff or Python, with continued lines joined."""
    language = None  # of the fence that is open
    for line in text.replace("\\\n", " ").splitlines():
        fence = re.match(r"```(\w*)", line)
        if fence:
            language = None if language is not None else fence[1]
        elif language in ("", "bash", "console") or (language is None and line.startswith("    ")):
            yield line.strip()


def _commands() -> list[tuple[str, str]]:
    """(page, command) without comments, pipes and redirections; one for each part of a line with &&."""
    starts = tuple(f"{name} " for name in PROGRAMS)
    found = []
    for page in PAGES:
        for line in _blocks((ROOT / page).read_text(encoding="utf-8")):
            for part in re.sub(r"\s+#\s.*$", "", line).split(" && "):
                command = re.split(r" [|>&]( |$)|; ", part)[0].strip()
                if f"{command} ".startswith(starts):
                    found.append((page, command))
    return found


COMMANDS = _commands()
PLANNED = sorted({command for _, command in COMMANDS if re.match(SNAKEMAKE, command)})


def test_every_command_is_run_or_has_a_reason_not_to_be_and_every_reason_is_needed() -> None:
    known = "|".join((SNAKEMAKE, MAKE, *NOT_RUN))
    assert len(COMMANDS) > 40
    assert [(page, command) for page, command in COMMANDS if not re.match(known, command)] == []
    for pattern in NOT_RUN:
        assert any(re.match(pattern, command) for _, command in COMMANDS), pattern


def test_make_and_snakemake_know_the_targets_and_options() -> None:
    from snakemake.cli import get_argument_parser

    targets = {word for _, command in COMMANDS if re.match(MAKE, command) for word in shlex.split(command)[1:]}
    done = subprocess.run(["make", "-n", *sorted(targets)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in PLANNED:
        get_argument_parser().parse_args(shlex.split(command)[1:])  # exits if not


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configurations that the pages write, and small inputs."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("Snakefile", "workflow", "profiles", "slurm", "configs", "config.yaml"):
        (folder / name).symlink_to(ROOT / name)
    with contextlib.chdir(folder):
        build_site({"one": prose(1)}, Path("results/demo/site"))
        build_site({"one": prose(1)}, Path("results/articles-site"))
        for name in ("data/urls", "texts"):
            Path(name).mkdir(parents=True)
        shutil.copy("results/demo/site/urls.txt", "data/urls/list.txt")
        write_shard(Path("texts/one.jsonl"), [document(1, prose(1))])
        quickstart = (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
        blocks = re.findall(r"```yaml\n(.*?)```", quickstart, re.DOTALL)
        for name, block in zip(("small", "books", "pages"), blocks, strict=True):
            Path(f"{name}.yaml").write_text(block)
        Path("my-urls.txt").write_text("https://site.example/\n")
        tutorial = (ROOT / "docs/openwebtext.md").read_text(encoding="utf-8")
        (edits,) = re.findall(r"```yaml\n(.*?)```", tutorial, re.DOTALL)
        mine = yaml.safe_load(Path("configs/openwebtext.yaml").read_text()) | yaml.safe_load(edits) | {"shards": 3}
        Path("my.yaml").write_text(yaml.safe_dump(mine))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", PLANNED)
def test_snakemake_plans_the_command(command: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command.replace("snakemake", "snakemake -n", 1))],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
