from pathlib import Path

from corpus.dedup.__main__ import dedup, main
from tests.conftest import Command
from tests.corpus.dedup.test_run import RULES, planted
from tests.helpers import assert_one_line_error, called, read_shard, write_shard


def phases(shards: list[Path], work: Path, output: Path, parts: int, jobs: int) -> None:
    """Run every phase; bands and verify in `jobs` commands of several parts each."""
    folder = ["--work", str(work)]
    for shard in shards:
        main(["signatures", "--input", str(shard), *folder])
    for phase in ("bands", "verify"):
        for job in range(jobs):
            main([phase, *folder, "--shards", "3", "--part", *(f"{part}/{parts}" for part in range(job, parts, jobs))])
    main(["clusters", *folder, "--shards", "3"])
    for shard in shards:
        main(["filter", "--input", str(shard), *folder, "--output-dir", str(output)])


def test_the_phases_one_by_one_write_what_run_writes_or_name_what_is_damaged(tmp_path: Path, command: Command) -> None:
    documents = planted(4)
    shards = [write_shard(tmp_path / "in" / f"{n:04d}.jsonl.zst", documents[n::3]) for n in range(3)]
    stats = dedup(shards, tmp_path / "run", RULES)
    assert stats.reasons.total() > 7
    work = tmp_path / "work"
    work.mkdir()
    for stale in ("0003.signatures", "7.pairs", "7.edges"):  # left by a run with other numbers
        (work / stale).write_text("stale")
    for parts, jobs in ((1, 1), (5, 2)):
        phases(shards, work, tmp_path / str(parts), parts, jobs)
        for path in sorted((tmp_path / "run").rglob("*.zst")):
            assert (tmp_path / str(parts) / path.relative_to(tmp_path / "run")).read_bytes() == path.read_bytes()
    clusters, (first, *_) = work / "all.clusters", shards
    (tmp_path / "1" / first.name).unlink()
    arguments = ["filter", "--input", first, "--work", work, "--output-dir", tmp_path / "1"]
    whole = clusters.read_bytes()
    for place in range(0, len(whole), len(whole) // 20):
        for damaged in (whole[:place], bytes([*whole[:place], whole[place] ^ 1, *whole[place + 1 :]])):
            clusters.write_bytes(damaged)
            result = called("corpus.dedup", *arguments)
            if result.returncode == 0:  # the damage is in what belongs to other shards
                assert (tmp_path / "1" / first.name).read_bytes() == (tmp_path / "run" / first.name).read_bytes()
                (tmp_path / "1" / first.name).unlink()
            else:
                assert_one_line_error(result, "all.clusters")
    clusters.write_bytes(whole)
    write_shard(shards[0], read_shard(shards[0])[:1])  # changed meanwhile
    assert_one_line_error(command("corpus.dedup", *arguments), "0000.jsonl.zst")
    assert not (tmp_path / "1" / first.name).exists()
