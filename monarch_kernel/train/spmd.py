"""Runs code that was written for torchrun in actors: sets the environment variables that ``torch.distributed`` reads."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from typing import NamedTuple

from monarch_kernel.actor import Actor, ProcMesh, current_rank, endpoint
from monarch_kernel.actor.channels import client_here
from monarch_kernel.runtime.host.network import AddressKind, address_of
from monarch_kernel.runtime.worker.store_client import StoreClient, serve_rendezvous, torch_store

__all__ = ["setup_torch_elastic_env", "setup_torch_elastic_env_async"]

_LOOPBACK = {"ipv4": "127.0.0.1", "ipv6": "::1"}


class _Place(NamedTuple):
    """The host of a rank, and the address at which others reach it."""

    host: str
    address: str


class _Meeting(NamedTuple):
    """Where the ranks meet: a store, the process that serves it, and a port for MASTER_PORT, at which nothing listens."""

    proc: int
    store: str
    port: int


class _Rendezvous(Actor):
    """Serves the store in which the ranks meet, as long as its process lives."""

    @endpoint
    def open(self, proc: int, address: str) -> _Meeting:
        client = client_here()
        store = f"environment {client.new_number()} {secrets.token_hex(8)}"
        client.stores.open(store)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as free:
            return _Meeting(proc, store, int(free.getsockname()[1]))


class _Environment(Actor):
    """Reports the host of its rank, and sets environment variables there."""

    @endpoint
    def place(self, kind: AddressKind | None) -> _Place:
        # The parent is the host's agent. One machine may have several agents, each with separate ranks and GPUs.
        host = f"{socket.gethostname()}/{os.getppid()}"
        return _Place(host, address_of(os.environ.get("GLOO_SOCKET_IFNAME", ""), kind))

    @endpoint
    def set(self, hosts: Sequence[str], address: str, port: int, meeting: _Meeting | None) -> None:
        rank, names = current_rank().rank, list(dict.fromkeys(hosts))
        host = hosts[rank]
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(len(hosts)),
            LOCAL_RANK=str(hosts[:rank].count(host)),
            LOCAL_WORLD_SIZE=str(hosts.count(host)),
            GROUP_RANK=str(names.index(host)),
            GROUP_WORLD_SIZE=str(len(names)),
            ROLE_RANK=str(rank),
            ROLE_WORLD_SIZE=str(len(hosts)),
            ROLE_NAME="default",
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="False",
            TORCHELASTIC_RESTART_COUNT="0",
            TORCHELASTIC_MAX_RESTARTS="0",
        )
        if meeting is not None:
            client = StoreClient(client_here(), meeting.proc, meeting.store)
            serve_rendezvous(torch_store(client), address, port)


async def setup_torch_elastic_env_async(
    proc_mesh: ProcMesh,
    master_addr: str | None = None,
    master_port: int | None = None,
    use_ipaddr: AddressKind | None = None,
) -> None:
    """Like `setup_torch_elastic_env`, without blocking the event loop."""
    _check(master_addr, master_port)
    environment = proc_mesh.spawn("environment", _Environment)
    places = (await environment.place.call(use_ipaddr)).values()
    address, port, meeting = master_addr or _address(places, use_ipaddr), master_port, None
    if port is None:
        first = _first(proc_mesh)
        meeting = await first.spawn("rendezvous", _Rendezvous).open.call_one(first.procs[0], address)
        port = meeting.port
    await environment.set.call([place.host for place in places], address, port, meeting)
    await environment.stop()


def setup_torch_elastic_env(
    proc_mesh: ProcMesh,
    master_addr: str | None = None,
    master_port: int | None = None,
    use_ipaddr: AddressKind | None = None,
) -> None:
    """Set torchrun's environment on each rank, so that its actors can call ``torch.distributed.init_process_group()``.

    Without an address, the first rank of the mesh serves the store in which the ranks meet, as long as it lives. This store has
    no port: ranks reach it by messages of the session. With an address, rank 0 of the group opens a ``TCPStore`` there, as
    ``init_process_group()`` does: a ``TCPStore`` has no authentication, so any process that reaches the port can join the
    group. Call this again before you form another group: an old store holds the addresses of the old group.

    Args:
        proc_mesh: the ranks; ranks of a slice are numbered within the slice.
        master_addr: address at which the ranks meet; needs ``master_port``.
        master_port: port at that address.
        use_ipaddr: kind of address at which the ranks meet, if none is given.

    Raises:
        ValueError: only one of address and port is given, or the host has no address of that kind.
        RanksError: setting the environment failed on some ranks.
    """
    _check(master_addr, master_port)
    environment = proc_mesh.spawn("environment", _Environment)
    places = environment.place.call(use_ipaddr).get().values()
    address, port, meeting = master_addr or _address(places, use_ipaddr), master_port, None
    if port is None:
        first = _first(proc_mesh)
        meeting = first.spawn("rendezvous", _Rendezvous).open.call_one(first.procs[0], address).get()
        port = meeting.port
    environment.set.call([place.host for place in places], address, port, meeting).get()
    environment.stop().get()


def _check(address: str | None, port: int | None) -> None:
    if (address is None) != (port is None):
        raise ValueError("master_addr and master_port go together: pass both or neither")


def _address(places: Sequence[_Place], kind: AddressKind | None) -> str:
    """The address at which the ranks meet: that of the first rank's host."""
    if len({place.host for place in places}) == 1:
        return _LOOPBACK[kind or "ipv4"]
    if not places[0].address:
        host = places[0].host.rpartition("/")[0]
        raise ValueError(
            f"the host of the first rank ({host}) has no {kind or 'IP'} address that others can reach; "
            "pass master_addr and master_port, or set GLOO_SOCKET_IFNAME to its network interface"
        )
    return places[0].address


def _first(mesh: ProcMesh) -> ProcMesh:
    return mesh.flatten("rank").slice(rank=0)
