"""A job that hangs reports where every process is."""

import re
import time
from pathlib import Path

from common.files import read_json
from tests.helpers import wait_for
from tests.training.helpers import Capsys, Job, make_run
from training.monitoring.heartbeat import Heartbeat, describe, unfinished


def test_silence_writes_the_stacks_and_a_line_once(tmp_path: Path, capsys: Capsys) -> None:
    stacks, lines = tmp_path / "heartbeat/a/rank_00000.stacks", list[str]()

    def told() -> str:
        lines.append(capsys.readouterr().err)
        return "".join(lines)

    with Heartbeat(tmp_path, 0, 0.2, "a") as heartbeat:
        heartbeat.beat(7, "save")
        wait_for(lambda: "iteration 7 (save)" in told())
        time.sleep(0.5)  # more than twice the silence
    assert told().count("\n") == 1 and "0.2 s: 1 of 1 ranks at iteration 7 (save)" in told()
    assert "test_silence_writes_the_stacks" in stacks.read_text()


def test_ranks_that_are_elsewhere_or_silent_are_named() -> None:
    life = {"host": "n1", "doing": "step", "iteration": 42, "time": 50.0}
    lives = [{**life, "rank": rank, "pid": 100 + rank} for rank in range(5)]
    lives[2]["iteration"], lives[3]["time"], lives[4]["time"] = 41, 40.0, 39.9
    assert describe(lives, fresh=40.0) == (
        "3 of 5 ranks at iteration 42 (step), rank 2 (process 102 on n1) at iteration 41 (step), "
        "rank 4 (process 104 on n1) has been silent since iteration 42 (step)"
    )


def test_the_first_call_of_each_group_that_did_not_complete_is_named() -> None:
    def call(group: int, number: int, state: str = "scheduled", pair: bool = False) -> dict[str, object]:
        about = {"pg_id": group, "process_group": [str(group), ("", "mesh_dp", "mesh_pp")[group]], "is_p2p": pair}
        about |= {"profiling_name": "nccl:send 0->1" if pair else "nccl:all_reduce", "retired": False, "state": state}
        return {**about, "collective_seq_id": 0 if pair else number, "p2p_seq_id": number if pair else 0}

    part_of_a_coalesced_call, done, hangs, later = (
        call(1, 6),
        call(1, 7, "completed"),
        call(1, 8, "started"),
        call(1, 9),
    )
    calls = [part_of_a_coalesced_call, done, hangs, call(2, 3, pair=True), later, call(2, 4, pair=True), call(0, 1)]
    status = {"1": {"last_completed_collective": "7"}, "0": {"last_completed_collective": "-1"}}
    named = ["nccl:all_reduce 8 of mesh_dp", "nccl:send 0->1 4 of mesh_pp", "nccl:all_reduce 1 of 0"]
    assert unfinished({"entries": calls, "pg_status": status}) == named


def test_a_stalled_rank_is_named_and_every_rank_shows_its_stacks(tmp_path: Path) -> None:
    config = make_run(tmp_path, parallel={"data": 2}, train={"iterations": 50}, watch={"silence_seconds": 1})
    with Job(2, "tests.training.failing", "--config", config, "--model", "tiny", "hangs") as job:
        job.wait_until_said("at iteration 3 (data)", "err")
        (folder,) = (tmp_path / "models/tiny/heartbeat").iterdir()
        wait_for(lambda: all((folder / f"rank_0000{rank}.stacks").stat().st_size for rank in range(2)))
        said = job.said(0, "err")
        pid = read_json(folder / "rank_00001.json")["pid"]
    assert f"rank 1 (process {pid} on " in said
    (call,) = re.findall(r"1 of 2 ranks at iteration 3 \(step, in (gloo:\w+ \d+) of ", said)
    assert call.split()[0] in (folder / "rank_00000.collectives.json").read_text()
    assert "rank_1_hangs_here" in (folder / "rank_00001.stacks").read_text()
    assert "compute_gradients" in (folder / "rank_00000.stacks").read_text()
