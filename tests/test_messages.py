"""What users see when something is wrong: each command line of this file, and the one line that it prints.

python -m tests.test_messages        # writes tests/messages.txt, to be read from top to bottom
"""

import contextlib
import importlib
import io
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson
import pytest
import yaml
import zstandard

from common import cli
from corpus.index import IndexWriter, Meta
from tests.cluster.fake_slurm import FakeSlurm
from tests.cluster.helpers import slurm_job
from tests.conftest import ROOT
from tests.helpers import document, prose, write_shard
from tests.test_commands import PACKAGES

SNAPSHOT = ROOT / "tests" / "messages.txt"
HEAD = """\
What each command says when something is wrong: one line on stderr, and exit code 2 unless another is named.
Written by `python -m tests.test_messages`, compared by tests/test_messages.py.
"""

COMMANDS = {
    "Packages": """
        corpus clena
        cluster stats
        training tidy
    """,
    "Options": """
        corpus.clean --input pages.jsonl.zst
        corpus.clean --input pages.jsonl.zst --output out.jsonl.zst --worker 3
        corpus.clean --input pages.jsonl.zst --output out.jsonl.zst --workers 0
        corpus.dedup runn --input pages.jsonl.zst --output-dir out
        corpus.blacklist --input urls.txt --output-dir out
    """,
    "Configuration": """
        corpus.clean --config none.yaml --input pages.jsonl.zst --output out.jsonl.zst
        corpus.clean --config empty.yaml --input pages.jsonl.zst --output out.jsonl.zst
        corpus.clean --config tab.yaml --input pages.jsonl.zst --output out.jsonl.zst
        corpus.clean --config config.yaml --input pages.jsonl.zst --output out.jsonl.zst clean.min_charcters=5
        corpus.clean --config config.yaml --input pages.jsonl.zst --output out.jsonl.zst claen.min_characters=5
        corpus.clean --config config.yaml --input pages.jsonl.zst --output out.jsonl.zst clean.min_characters=few
        corpus.clean --config config.yaml --input pages.jsonl.zst --output out.jsonl.zst clean.language=klingon
        corpus.clean --config config.yaml --input pages.jsonl.zst --output out.jsonl.zst shards=0
        training.train --config config.yaml --model tinny
        training.train --config config.yaml --model tiny model.n_head=3
        training.train --config config.yaml --model tiny parallel.tensor=3
        training.train --config config.yaml --model tiny train.global_batch_size=7 train.micro_batch_size=2
        training.train --config config.yaml --model tiny train.split=1,2
    """,
    "Inputs and outputs": """
        corpus.clean --input none.jsonl.zst --output out.jsonl.zst
        corpus.clean --input *.nothing --output out.jsonl.zst
        corpus.clean --input folder --output out.jsonl.zst
        corpus.clean --input damaged.jsonl.zst --output out.jsonl.zst
        corpus.clean --input truncated.jsonl.zst --output out.jsonl.zst
        corpus.clean --input lines.jsonl.zst --output out.jsonl.zst
        corpus.clean --input pages.jsonl.zst --output pages.jsonl.zst
        corpus.clean --input pages.jsonl.zst --output folder
        corpus.clean --input pages.jsonl.zst --output urls.txt/out.jsonl.zst
        corpus.clean --input short.jsonl.zst --output out.jsonl.zst
    """,
    "corpus": """
        corpus.blacklist --input urls.txt --output-dir out --shards 2 blacklist.domain_lists=[none.txt]
        corpus.scrape --urls empty.txt --output out.jsonl.zst
        corpus.scrape --urls urls.txt --output out.jsonl.zst
        corpus.ingest --output out.jsonl.zst
        corpus.ingest --input urls.txt --output-dir out --shards 99999999
        corpus.dedup bands --signatures folder --output out.pairs --part 0/2
        corpus.decontaminate count --input pages.jsonl.zst --output out.json
        corpus.tokenize --input urls.txt --output-prefix out
        corpus.tokenize --input pages.jsonl.zst --output-prefix out tokenize.encoder_json=none.json
        corpus.train_tokenizer --input short.jsonl.zst --output-dir out --vocab-size 50000
        corpus.merge_index --inputs folder --output-prefix out
        corpus.merge_index --inputs data/cut --output-prefix out
        corpus.index inspect data/cut
        corpus.index inspect data/none
        corpus.index inspect data/few.idx
    """,
    "training": """
        training.train --config config.yaml --model tiny
        training.train --config config.yaml --model tiny "data=[{prefix: data/none, weight: 1}]"
        training.evaluate --checkpoint none --data data/few
        training.evaluate --checkpoint folder --data none.txt
        training.evaluate --checkpoint folder --data urls.txt --part valid
        training.evaluate --checkpoint folder --data urls.txt pages.txt --task lambada
        training.evaluate --checkpoint folder --data urls.txt
        training.generate --checkpoint folder --prompt Once
        training.generate --checkpoint folder --prompt Once --temperature -1
        training.plan --config config.yaml --model tiny --gpu H1000
    """,
    "convert": """
        convert.merge_mp --checkpoint none --output out
        convert.merge_mp --checkpoint folder --output out
        convert.merge_mp --checkpoint folder --output out --max-shard-size big
        convert.merge_mp --checkpoint folder --output data
        convert.merge_mp --checkpoint folder/mp_rank_00 --output out
        convert.from_megatron --config config.yaml --model tiny --checkpoint none
    """,
    "cluster": """
        cluster.status none
        cluster.status --watch none
        cluster.status --watch --json
        cluster.logs folder
        cluster.logs results/x/models/waiting
        cluster.cancel none
        cluster.submit --config config.yaml --model refused
    """,
    "report and demo": """
        report --run none --output out.html
        report --run folder --output out.html
        report --run folder --output out.html shards=3
        demo.build --output urls.txt
        demo.serve --site none
    """,
}


def lay_out() -> None:
    """The files that the command lines name; in the current folder."""
    raw = {
        "run": "results/x",
        "urls": ["urls.txt"],
        "models": {
            name: {
                "model": {"n_layer": 1, "n_head": 2, "n_embd": 8, "seq_len": 8},
                "train": {"iterations": 5, "micro_batch_size": 1},
                **({"data": [{"prefix": "data/few", "weight": 1}]} if name == "refused" else {}),
            }
            for name in ("tiny", "refused")
        },
        "cluster": {"executor": "slurm", "gpus_per_node": 1, "partition": "gpu"},
    }
    for name in ("folder/mp_rank_00", "data", "results/x/models/tiny"):
        Path(name).mkdir(parents=True)
    Path("config.yaml").write_text(yaml.safe_dump(raw))
    Path("empty.yaml").touch()
    Path("tab.yaml").write_text("run: x\nclean:\n\tmin_characters: 5\n")
    Path("urls.txt").write_text("http://site.example/\n")
    Path("pages.txt").write_text(prose(1))
    Path("empty.txt").touch()
    write_shard(Path("pages.jsonl.zst"), [document(1, prose(1))])
    write_shard(Path("short.jsonl.zst"), [document(1, "Too short.")])
    whole = Path("pages.jsonl.zst").read_bytes()
    Path("truncated.jsonl.zst").write_bytes(whole[: len(whole) // 2])
    Path("damaged.jsonl.zst").write_bytes(b"no zstd at all")
    good = orjson.dumps(document(1, prose(1)))
    Path("lines.jsonl.zst").write_bytes(zstandard.compress(good + b'\n{"text": 5}\n'))
    meta = Meta(vocab_size=50257, end_of_text=50256)
    for name in ("few", "cut"):
        with IndexWriter(Path("data", name), np.uint16, meta) as writer:
            for _ in range(200):
                writer.add_document(np.array([5, 6, 7, 8, 50256], np.uint16))
    with Path("data/cut.bin").open("r+b") as file:
        file.truncate(100)


def message(words: Sequence[str]) -> str:
    """What a command prints on stderr, and its exit code if that is not 2."""
    module, *rest = words
    main = importlib.import_module(f"{module}.__main__" if module in PACKAGES else module).main
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = cli.run(lambda: main(rest), signals=False)
        except SystemExit as leave:  # argparse
            code = leave.code
    lines = [*errors.getvalue().strip().splitlines(), *([f"(exit code {code})"] if code != 2 else [])]
    return "\n".join(lines)


def render(folder: Path) -> str:
    """All commands with their messages, run in an empty folder."""
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        lay_out()
        fake = FakeSlurm(folder.parent / "slurm")
        fake.behave(refuses="Invalid partition name specified")
        patch.setenv("PATH", fake.path)
        waiting = Path("results/x/models/waiting")
        waiting.mkdir()
        slurm_job(waiting.absolute(), fake, "PENDING", reason="Resources")
        sections = []
        for title, commands in COMMANDS.items():
            entries = []
            for line in commands.strip().splitlines():
                said = message(shlex.split(line)).replace(f"{folder}/", "").replace(f"{ROOT}/", "")
                entries.append(
                    f"    $ python -m {line.strip()}\n" + "".join(f"    {row}\n" for row in said.splitlines())
                )
            sections.append(f"{title}\n{'-' * len(title)}\n\n" + "\n".join(entries))
        return f"{HEAD}\n" + "\n\n".join(sections)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("messages") / "work"
    folder.mkdir()
    return render(folder)


def test_every_message_is_the_one_on_file(text: str) -> None:
    filed = SNAPSHOT.read_text(encoding="utf-8")
    if sys.version_info >= (3, 12):  # it quotes the choices of an option otherwise
        text, filed = text.replace("'", ""), filed.replace("'", "")
    assert text == filed, "if it reads better: python -m tests.test_messages"


def test_every_error_is_one_line(text: str) -> None:
    for entry in text.split("    $ ")[1:]:
        command, *said = [line.strip() for line in entry.partition("\n\n")[0].splitlines()]
        errors = [line for line in said if not line.startswith("warning: ")]
        assert len(errors) == 1 and "error: " in errors[0], command
        assert len(errors[0]) < 420, command


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        work = Path(name).resolve() / "work"
        work.mkdir()
        SNAPSHOT.write_text(render(work), encoding="utf-8")
    sys.exit()
