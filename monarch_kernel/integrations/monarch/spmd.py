"""``monarch.spmd``: programs that were written for torchrun, in actors."""

from __future__ import annotations

import os
import runpy
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from monarch_kernel.actor import Actor, context, endpoint
from monarch_kernel.integrations.monarch.missing import refuse
from monarch_kernel.integrations.monarch.network import AddrType
from monarch_kernel.runtime.host.network import AddressKind, address_of
from monarch_kernel.train.spmd import setup_torch_elastic_env, setup_torch_elastic_env_async

__all__ = ["SPMDActor", "setup_torch_elastic_env", "setup_torch_elastic_env_async"]


_KINDS: dict[AddrType, AddressKind] = {AddrType.IPv4: "ipv4", AddrType.IPv6: "ipv6"}


class SPMDActor(Actor):
    """Runs a script or a module on its rank, as torchrun does. The last axis of the mesh counts the ranks of a host."""

    def __init__(self) -> None:
        point = context().actor_instance.rank
        labels = list(point.extent)
        self.rank = point.rank
        self.world_size = point.extent.nelements
        self.local_rank = point[labels[-1]] if labels else 0
        self.nproc_per_node = point.extent[labels[-1]] if labels else 1

    @endpoint
    def get_host_port(self, use_ipaddr: AddressKind | AddrType | None) -> tuple[str, int]:
        """Return the address of this rank's host, and a free port, for the others to meet at."""
        if isinstance(use_ipaddr, AddrType):
            use_ipaddr = _KINDS.get(use_ipaddr)
        address = address_of(os.environ.get("GLOO_SOCKET_IFNAME", ""), use_ipaddr) or "127.0.0.1"
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as free:
            return address, int(free.getsockname()[1])

    @endpoint
    def setup_env(self, master_addr: str, master_port: int) -> None:
        """Set the environment of torchrun.

        Args:
            master_addr: where rank 0 listens.
            master_port: the port there.
        """
        self._set_environment(master_addr, master_port)

    @endpoint
    def main(self, master_addr: str, master_port: int, script_args: Sequence[str]) -> bool:
        """Run a script with the environment of torchrun; True if it ended without an error.

        Args:
            master_addr: where rank 0 listens.
            master_port: the port there.
            script_args: the script and its arguments, or ``-m``, a module, and its arguments.

        Raises:
            ValueError: there is no script.
        """
        arguments = list(script_args)
        is_module = arguments[:1] == ["-m"]
        if is_module:
            del arguments[0]
        if not arguments:
            raise ValueError("script_args must name a script, or a module after -m")
        self._set_environment(master_addr, master_port)
        before, sys.argv = sys.argv, arguments
        try:
            if is_module:
                runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
                runpy.run_path(arguments[0], run_name="__main__")
        finally:
            sys.argv = before
        return True

    def _set_environment(self, master_addr: str, master_port: int) -> None:
        nodes = -(-self.world_size // self.nproc_per_node)
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.nproc_per_node),
            GROUP_RANK=str(self.rank // self.nproc_per_node),
            GROUP_WORLD_SIZE=str(nodes),
            ROLE_RANK=str(self.rank),
            ROLE_WORLD_SIZE=str(self.world_size),
            ROLE_NAME="rank",
            MASTER_ADDR=master_addr,
            MASTER_PORT=str(master_port),
        )


def __getattr__(name: str) -> NoReturn:
    refuse("monarch.spmd", name)
