import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from common.errors import InputError
from common.stats import Stats
from corpus.dedup import __main__ as steps
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
    for key, value in {"shingle_characters": 6, "shingle_words": 3, "bands": 19, "rows": 5, "seed": 2}.items():
        other = called(main, "bands", "--work", work, "--shards", 3, "--part", "0/1", f"dedup.{key}={value}")
        assert_one_line_error(other, "other settings of dedup", f"{key} ")
    clusters, (first, *_) = work / "all.clusters", shards
    (tmp_path / "1" / first.name).unlink()
    arguments = ["filter", "--input", first, "--work", work, "--output-dir", tmp_path / "1"]
    whole = clusters.read_bytes()
    for place in range(0, len(whole), len(whole) // 20):
        for damaged in (whole[:place], bytes([*whole[:place], whole[place] ^ 1, *whole[place + 1 :]])):
            clusters.write_bytes(damaged)
            result = called("corpus.dedup", *arguments)
            if result.returncode == 0:  # the damage is in what belongs to other shards
                for name in (first.name, f"removed/{first.name}"):
                    assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
                (tmp_path / "1" / first.name).unlink()
            else:
                assert_one_line_error(result, "all.clusters")
    clusters.write_bytes(whole)
    write_shard(shards[0], read_shard(shards[0])[:1])  # changed meanwhile
    assert_one_line_error(command("corpus.dedup", *arguments), "0000.jsonl.zst")
    assert not (tmp_path / "1" / first.name).exists()


def test_without_documents_the_step_that_dropped_them_all_is_named_and_two_inputs_of_one_name_are_refused(
    tmp_path: Path,
) -> None:
    shard, work = write_shard(tmp_path / "clean/0000.jsonl.zst", []), tmp_path / "dedup/work"
    Stats("clean", documents_in=3, reasons=Counter(language=2, short=1)).finish(tmp_path / "clean/0000.stats.json")
    Stats("clean", 9, 9).finish(tmp_path / "clean/0001.stats.json")  # of a configuration with more shards
    assert called(main, "signatures", "--input", shard, "--work", work).returncode == 0
    why = f"no documents in 1 shard(s); of 3 in {tmp_path}/clean, all were dropped (2 language, 1 short)"
    assert_one_line_error(called(main, "bands", "--work", work, "--shards", 1, "--part", "0/1"), why)
    assert_one_line_error(called(main, "run", "--input", shard, "--output-dir", tmp_path / "dedup"), why)
    assert not list((tmp_path / "dedup").glob("*.zst"))
    twice = (shard, write_shard(tmp_path / "other/0000.jsonl.zst", planted(1)))
    same_name = called(main, "run", "--input", *twice, "--output-dir", tmp_path / "out")
    assert_one_line_error(same_name, "0000.jsonl.zst: two inputs have this file name")


def test_a_killed_run_goes_on_from_what_it_has_finished_and_repeats_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = planted(4)
    shards = [write_shard(tmp_path / "in" / f"{n:04d}.jsonl.zst", documents[n::3]) for n in range(3)]
    expected = dedup(shards, tmp_path / "whole", RULES).as_dict()
    work, done = tmp_path / "out/work.tmp", list[str]()

    def ended(*_: object) -> None:
        raise KeyboardInterrupt

    def noted(name: str) -> None:
        real: Any = getattr(steps, name)

        def call(*arguments: Any, **options: Any) -> Any:
            done.append(f"{name} {arguments[0].name}" if name == "write_signatures" else name)
            return real(*arguments, **options)

        monkeypatch.setattr(steps, name, call)

    for name in ("write_signatures", "write_pairs", "write_edges", "write_clusters"):
        with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
            killed.setattr(steps, name, ended)
            dedup(shards, tmp_path / "out", RULES)
    for name in ("write_signatures", "write_pairs", "write_edges", "write_clusters"):
        noted(name)
    (work / "mine.txt").write_text("a note")
    with pytest.raises(InputError, match=r"mine\.txt: was not made by this tool"):
        dedup(shards, tmp_path / "out", RULES)
    (work / "mine.txt").unlink()
    again = dedup(shards, tmp_path / "out", RULES)
    assert done == ["write_clusters"]
    assert {**again.as_dict(), "seconds": 0} == {**expected, "seconds": 0} and not work.exists()
    for path in sorted((tmp_path / "whole").rglob("*.*")):
        assert (tmp_path / "out" / path.relative_to(tmp_path / "whole")).read_bytes() == path.read_bytes()

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(steps, "write_clusters", ended)
        dedup(shards, tmp_path / "out", RULES)
    done.clear()
    time = shards[1].stat().st_mtime_ns
    write_shard(shards[1], read_shard(shards[1])[1:])
    os.utime(shards[1], ns=(time, time))
    dedup(shards, tmp_path / "out", RULES)
    assert done == ["write_signatures 0001.jsonl.zst", "write_pairs", "write_edges", "write_clusters"]
