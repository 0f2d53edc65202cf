"""Commands of README and docs that are not `python -m` (see test_examples.py), and the configurations beside them."""

import re
import shlex
import subprocess
from collections.abc import Iterator

import yaml

from common.settings import Settings
from common.yaml_text import merged, read_yaml
from tests.conftest import ROOT

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
    r"python -c '": "needs real pages, or loads what tests/workflow/test_all.py does",
}


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


def test_every_command_is_run_or_has_a_reason_not_to_be_and_every_reason_is_needed() -> None:
    known = "|".join((r"(snakemake|make)\b", *NOT_RUN))
    assert len(COMMANDS) > 40
    assert [(page, command) for page, command in COMMANDS if not re.match(known, command)] == []
    for pattern in NOT_RUN:
        assert any(re.match(pattern, command) for _, command in COMMANDS), pattern


def test_make_and_snakemake_know_the_targets_and_options() -> None:
    from snakemake.cli import get_argument_parser

    targets = {word for _, command in COMMANDS if command.startswith("make") for word in shlex.split(command)[1:]}
    done = subprocess.run(["make", "-n", *sorted(targets)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for _, command in COMMANDS:
        if command.startswith("snakemake"):
            get_argument_parser().parse_args(shlex.split(command)[1:])  # exits if not


def test_the_configurations_that_the_pages_write_are_valid() -> None:
    changed = {"quickstart": "config.yaml", "openwebtext": "configs/openwebtext.yaml"}
    for name, file in changed.items():
        page = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
        for block in map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)):
            alone = name == "quickstart" and "run" in block
            Settings.model_validate(block if alone else merged(read_yaml(ROOT / file), block))
