"""The addresses and network interfaces over which the processes of a job reach each other.

`cluster.interface` names one (ib0, eth1); without it, processes on one node use loopback, and rank 0 of several nodes
publishes its name in Slurm's node list, or its host name.
"""

import os
import socket

import psutil

from common.errors import ConfigError
from training.parallel.launch import Launch, node_name

LOOPBACK = "127.0.0.1"


def _addresses() -> list[tuple[str, str]]:
    """(interface, IPv4 address) of this node."""
    found = psutil.net_if_addrs()
    return [(name, entry.address) for name in found for entry in found[name] if entry.family == socket.AF_INET]


def address_of(interface: str) -> str:
    """The IPv4 address of an interface of this node. Raises ConfigError that lists those that exist."""
    addresses = _addresses()
    for name, address in addresses:
        if name == interface:
            return address
    existing = ", ".join(f"{name} ({address})" for name, address in addresses)
    raise ConfigError(f"cluster.interface: {node_name()} has no {interface!r} with an IPv4 address, only {existing}")


def check_interface(interface: str) -> None:
    """Raises ConfigError if this node lacks the interface of the settings."""
    if interface:
        address_of(interface)


def published_host(launch: Launch, interface: str) -> str:
    """The name or address by which the other processes reach this one (rank 0).

    A name rather than an address as seen from itself: Debian resolves a machine's own name to 127.0.1.1.
    """
    if interface:
        return address_of(interface)
    if launch.nodes == 1:
        return LOOPBACK
    if launch.launcher == "slurm" and _resolve(node_name()):  # a cluster may have names that only Slurm knows
        return node_name()
    return socket.gethostname()


def listening_address(launch: Launch, interface: str) -> str:
    """The address that rank 0 binds its ports to; empty for all of them."""
    return address_of(interface) if interface else LOOPBACK if launch.nodes == 1 else ""


def _resolve(name: str) -> str:
    """The IPv4 address of a host; empty if its name is unknown."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def set_interface(launch: Launch, interface: str, own_address: str) -> None:
    """Tell gloo and NCCL which interface to use, before the process group is made.

    gloo's default is the address of the host's own name. Where that is loopback although the job has several nodes, it
    gets the interface of `own_address`, over which this process reaches the others. NCCL avoids loopback by itself.
    """
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"] = interface, f"={interface}"  # =: no prefix
    elif launch.nodes == 1:
        if "lo" in (name for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a laptop's host name often does not resolve
    elif (_resolve(socket.gethostname()) or LOOPBACK).startswith("127."):
        names = [name for name, address in _addresses() if address == own_address]
        if names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
