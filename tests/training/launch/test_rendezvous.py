"""Processes of a job meet without a guessed port, over the right interface."""

import os
import socket
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore

from common.errors import JobError
from tests.helpers import PATIENCE
from tests.training.helpers import launch, make_run
from training.launch.rank import Launch
from training.launch.rendezvous import listening_address, published_host, rendezvous, set_interface

TWO_NODES = Launch("slurm", 1, 2, 0, 1, 2, "slurm-1.0-0")
ONE_NODE = Launch("slurm", 0, 2, 0, 2, 1, "slurm-1.0-0")


def two_ranks() -> list[Launch]:
    return [Launch("submitit", rank, 2, rank, 2, 1, "local-1") for rank in range(2)]


def test_processes_meet_and_leave_no_file_even_after_a_killed_start(tmp_path: Path) -> None:
    with socket.socket() as unused:  # bound but not listening: whoever connects is refused
        unused.bind(("127.0.0.1", 0))
        stale = tmp_path / "meeting-local-1"
        stale.write_text(f"127.0.0.1:{unused.getsockname()[1]}\n")
        stores = {}

        def come(rank: Launch) -> None:
            stores[rank.rank] = rendezvous(rank, tmp_path, timeout=PATIENCE)

        late = [threading.Timer(delay, come, [rank]) for rank, delay in zip(two_ranks(), (0.5, 0), strict=True)]
        for thread in late:
            thread.start()
        for thread in late:
            thread.join()
        stores[1].set("greeting", "hello")
        assert stores[0].get("greeting") == b"hello"
        assert not list(tmp_path.iterdir())


def test_a_process_that_waits_for_nobody_raises_job_error(tmp_path: Path) -> None:
    for rank, says in zip(two_ranks(), ("rank 0 .* rank 1", "rank 1"), strict=True):
        with pytest.raises(JobError, match=says):
            rendezvous(rank, tmp_path, timeout=1)
        assert not list(tmp_path.iterdir())


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"SLURMD_NODENAME": "node1"})


def known_hosts(monkeypatch: pytest.MonkeyPatch, **addresses: str) -> None:
    def look_up(name: str) -> str:
        if name not in addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return addresses[name]

    monkeypatch.setattr(socket, "gethostbyname", look_up)
    monkeypatch.setattr(socket, "gethostname", lambda: "machine")


@pytest.mark.usefixtures("environment")
def test_rank_0_publishes_its_name_in_the_node_list_where_the_network_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert published_host(TWO_NODES, "lo") == listening_address(TWO_NODES, "lo") == "127.0.0.1"
    known_hosts(monkeypatch, machine="127.0.1.1", node1="10.0.0.1")
    assert published_host(TWO_NODES, "") == "node1"
    known_hosts(monkeypatch, machine="127.0.1.1")  # several nodes on one machine, whose names only Slurm knows
    assert published_host(TWO_NODES, "") == "machine"
    assert published_host(ONE_NODE, "") == "127.0.0.1"
    assert (listening_address(TWO_NODES, ""), listening_address(ONE_NODE, "")) == ("", "127.0.0.1")


@pytest.mark.usefixtures("environment")
def test_gloo_never_takes_loopback_for_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own name often stands for 127.0.1.1."""
    monkeypatch.setattr(
        "training.launch.rendezvous._addresses",
        lambda: [("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("ib0", "10.1.0.1")],
    )
    known_hosts(monkeypatch, machine="127.0.1.1")
    reaches = Mock(own_address="10.1.0.1")
    set_interface(TWO_NODES, "", HashStore(), reaches)
    assert os.environ.pop("GLOO_SOCKET_IFNAME") == "ib0"
    known_hosts(monkeypatch, machine="10.0.0.1")
    set_interface(TWO_NODES, "", HashStore(), reaches)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    os.environ["GLOO_SOCKET_IFNAME"] = "inherited"
    set_interface(TWO_NODES, "eth0", HashStore(), reaches)
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("eth0", "=eth0")


def test_a_job_with_a_wrong_interface_ends_in_one_line(tmp_path: Path) -> None:
    sections = {"parallel": {"data": 2}, "train": {"iterations": 1}}
    config = make_run(tmp_path / "wrong", cluster={"interface": "wrong"}, **sections)
    results = launch(2, "training.train", "--config", config, "--model", "tiny")
    assert [result.returncode for result in results] == [2, 2]
    assert "'wrong'" in results[0].stderr and results[0].stderr.count("\n") == 1
