from pathlib import Path

import pytest

from corpus.dedup.__main__ import main
from corpus.dedup.run import dedup
from tests.conftest import Command
from tests.corpus.dedup.test_run import RULES, planted
from tests.helpers import assert_one_line_error, read_shard, write_shard


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    documents = planted(6)
    return [write_shard(tmp_path / "in" / f"{n:04d}.jsonl.zst", documents[n::3]) for n in range(3)]


def phases(shards: list[Path], work: Path, output: Path, parts: int, jobs: int = 0) -> None:
    """Run every phase; bands and verify in `jobs` commands of several parts each (default: one part each)."""
    for shard in shards:
        name = shard.name.removesuffix(".jsonl.zst")
        main(["signatures", "--input", str(shard), "--output", str(work / f"{name}.signatures")])
    folders = ["--signatures", str(work), "--shards", "3"]
    for phase, share, suffix in (("bands", "--part", "pairs"), ("verify", "--block", "edges")):
        for job in range(jobs or parts):
            mine = range(job, parts, jobs or parts)
            outputs = [str(work / f"{part}.{suffix}") for part in mine]
            main([phase, *folders, share, *(f"{part}/{parts}" for part in mine), "--output", *outputs])
        folders += ["--pairs", str(work)] if phase == "bands" else []
    main(["clusters", *folders, "--edges", str(work), "--output", str(work / "all.clusters")])
    for shard in shards:
        main(["filter", "--input", str(shard), "--clusters", str(work / "all.clusters"), "--output-dir", str(output)])


def test_the_phases_one_by_one_write_what_run_writes(tmp_path: Path, shards: list[Path]) -> None:
    stats = dedup(shards, tmp_path / "run", RULES)
    assert stats.reasons.total() > 10
    work = tmp_path / "work"
    work.mkdir()
    for stale in ("0003.signatures", "7.pairs", "7.edges"):  # left by a run with other numbers
        (work / stale).write_text("stale")
    for parts, jobs in ((1, 1), (3, 3), (21, 2)):
        phases(shards, work, tmp_path / str(parts), parts, jobs)
        for path in sorted((tmp_path / "run").rglob("*.zst")):
            assert (tmp_path / str(parts) / path.relative_to(tmp_path / "run")).read_bytes() == path.read_bytes()


def test_a_shard_that_changed_meanwhile_is_an_error_and_leaves_no_output(
    tmp_path: Path, shards: list[Path], command: Command
) -> None:
    work = tmp_path / "work"
    phases(shards, work, tmp_path / "out", 1)
    (tmp_path / "out" / shards[0].name).unlink()
    write_shard(shards[0], read_shard(shards[0])[:1])
    arguments = ["--input", shards[0], "--clusters", work / "all.clusters", "--output-dir", tmp_path / "out"]
    assert_one_line_error(command("corpus.dedup", "filter", *arguments), "0000.jsonl.zst", "run the phase `signatures`")
    assert not (tmp_path / "out" / shards[0].name).exists()


def test_bands_that_miss_pairs_at_the_threshold_are_a_warning(
    tmp_path: Path, shards: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    phase = ["signatures", "--input", str(shards[0]), "--output", str(tmp_path / "0.signatures"), "--threshold"]
    main([*phase, "0.7"])
    assert capsys.readouterr().err == ""
    main([*phase, "0.5"])
    assert "20 bands of 6 rows find 27% of the pairs at Jaccard 0.5" in capsys.readouterr().err


def test_a_missing_phase_is_named(tmp_path: Path, command: Command) -> None:
    arguments = ["--signatures", tmp_path, "--output", tmp_path / "0.pairs"]
    assert_one_line_error(command("corpus.dedup", "bands", *arguments, "--part", "0/1"), "run the phase `signatures`")
    assert_one_line_error(command("corpus.dedup", "bands", *arguments, "--part", "1/1"), "--part", "J/N")
    assert_one_line_error(command("corpus.dedup", "bands", *arguments, "--part", "0/2", "1/2"), "give one for each")
