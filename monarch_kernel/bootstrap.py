"""Composition: the roles of the package's processes, and the parts of each role.

The package itself starts the roles ``agent``, ``zygote FD`` and ``rank FD``, by `launch.base.module_command`; users never do.
"""

from __future__ import annotations

import sys

# ``python -m`` puts the working directory first on the path, where a user's own ``torch.py`` may be; ranks get the path that
# the controller has.
if __name__ == "__main__" and sys.path and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

import faulthandler
import importlib
import os
from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from monarch_kernel.base.directories import make_session_directory
from monarch_kernel.net.transport.base import host_peer
from monarch_kernel.net.wire.config import AGENT_VARIABLE, SAME, AgentConfig
from monarch_kernel.net.wire.messages import RankSpec

if TYPE_CHECKING:
    from monarch_kernel.runtime.host.read_counts import ReaderOf
    from monarch_kernel.runtime.worker.rank import Shell

__all__ = ["main", "run_light_rank", "run_rank"]

# The features of a rank; each registers itself (`runtime.worker.extensions`).
_FEATURES = (
    "monarch_kernel.runtime.worker.namespace_queries",
    "monarch_kernel.runtime.worker.forked_loaders",
    "monarch_kernel.runtime.worker.interrupted_loaders",
    "monarch_kernel.runtime.worker.spawned",
    "monarch_kernel.features.debugging.worker",
    "monarch_kernel.features.debugging.dap_worker",
    "monarch_kernel.features.editing.worker",
    "monarch_kernel.features.traffic.worker",
    "monarch_kernel.features.live.trajectory_worker",
    "monarch_kernel.features.live.worker",
    "monarch_kernel.features.profiling.late_worker",
    "monarch_kernel.features.profiling.worker",
    "monarch_kernel.features.record.worker",  # after live.worker, which makes the loops that it follows
    "monarch_kernel.features.replicas.in_loop",
    "monarch_kernel.features.tensors.results",
    "monarch_kernel.features.tensors.worker",
    "monarch_kernel.features.watch.loader",
    "monarch_kernel.features.watch.worker",
    "monarch_kernel.features.widgets.worker",
    "monarch_kernel.train.snapshots.buddy_store",
)
_PRELOAD = (
    "monarch_kernel.net.transport.forks",  # first: its fork functions come before those of other modules
    "torch",
    "torch.distributed",
    "monarch_kernel.actor.hosting.enable_hosting",
    "monarch_kernel.net.hosts.zmq",
)
# IPython, which actors do not need.
_PRELOAD_LATER = (
    "monarch_kernel.runtime.worker.cell_shell",
    "monarch_kernel.runtime.worker.ipython_shell:prepare",
    "monarch_kernel.train.process_group.worker",
    *_FEATURES,
)
# All that `run_rank` imports: a module that each rank imported itself would take memory in each.
_PRELOAD_LIGHT = (
    "monarch_kernel.net.transport.forks",
    "monarch_kernel.actor.hosting.enable_hosting",
    "monarch_kernel.net.hosts.zmq",
    "monarch_kernel.actor.proc_mesh",
    *_FEATURES,
    "monarch_kernel.runtime.worker.environment",
    "monarch_kernel.runtime.worker.light_shell",
    "monarch_kernel.runtime.worker.rank",
    "monarch_kernel.runtime.worker.stdio",
    "monarch_kernel.train.process_group.worker",
)


def run_agent() -> None:
    """Run a host agent, configured by standard input."""
    from monarch_kernel.runtime.host.descendants import name_agent
    from monarch_kernel.runtime.host.processes import end_by_sigterm, raise_descriptor_limit
    from monarch_kernel.runtime.host.zygote import Zygote

    name_agent()
    raise_descriptor_limit()  # each rank takes several, and so do unauthenticated connections
    config = agent_config(os.environ, sys.stdin.buffer.read)
    address = config.addresses[0] if config.addresses and config.addresses[0].startswith("ipc://") else ""
    addresses = address, f"ipc://{config.directory}/{host_peer(config.host).decode()}"
    entry = "monarch_kernel.bootstrap:run_light_rank" if config.is_light else "monarch_kernel.bootstrap:run_rank"
    preload, later = (_PRELOAD_LIGHT, ()) if config.is_light else (_PRELOAD, _PRELOAD_LATER)

    def make_zygote() -> Zygote:
        leftover = config.directory if config.has_own_directory else ""
        return Zygote(entry, preload, later, addresses, config.token, config.log, leftover)

    first = [] if config.is_idle else [make_zygote()]  # before other imports: it takes the longest
    from monarch_kernel.runtime.host.agent import HostAgent

    agent = HostAgent(config, lambda: first.pop() if first else make_zygote())
    agent.run()
    if agent.preemption.has_started:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        end_by_sigterm()


def agent_config(environment: MutableMapping[str, str], read: Callable[[], bytes]) -> AgentConfig:
    """Read the configuration of an agent: from its environment, which does not pass it on, or from ``read``.

    Raises:
        SystemExit: there is no valid configuration.
    """
    data = environment.pop(AGENT_VARIABLE, "").encode() or read()
    try:
        config = AgentConfig.decode(data)
        if config.number_from:
            config = config.numbered(int(environment[config.number_from]))
    except (ValueError, KeyError) as error:  # without its text, which contains secrets
        raise SystemExit(f"this is not a configuration of a host agent: {type(error).__name__}") from None
    return config if config.directory else config.placed(make_session_directory())


def run_light_rank(spec: RankSpec, addresses: Sequence[str], token: str, helper: int, secret: str) -> None:
    """Run a rank that has neither torch nor IPython until the user's code imports them."""
    run_rank(spec, addresses, token, helper, secret, is_light=True)


def run_rank(
    spec: RankSpec, addresses: Sequence[str], token: str, helper: int, secret: str, *, is_light: bool = False
) -> None:
    """Run a rank, in a process that was just forked from the zygote."""
    from monarch_kernel.actor.hosting.enable_hosting import host_actors
    from monarch_kernel.actor.proc_mesh import ProcMesh
    from monarch_kernel.base.mesh import Extent, Region
    from monarch_kernel.net.hosts.zmq import ZmqRank
    from monarch_kernel.net.transport.base import rank_peer
    from monarch_kernel.runtime.host.silent_stacks import listen
    from monarch_kernel.runtime.rpc.handles import PROCESS
    from monarch_kernel.runtime.worker.environment import settle
    from monarch_kernel.runtime.worker.extensions import install_all
    from monarch_kernel.runtime.worker.rank import Rank
    from monarch_kernel.runtime.worker.stdio import install_streams
    from monarch_kernel.train.process_group.worker import RankGroup

    for feature in _FEATURES:
        importlib.import_module(feature)
    settle(spec)
    controller, gateway = addresses
    marks = install_streams(secret, _reader_of(gateway, spec.proc, secret))
    faulthandler.enable(2, all_threads=False)
    listen(os.path.dirname(addresses[1].removeprefix("ipc://")), spec.proc)
    name = rank_peer(spec.proc, spec.incarnation)
    own_address = f"{gateway.rpartition('/')[0]}/{name.decode()}"
    transport = ZmqRank(controller, name, own_address, gateway, has_line=not spec.record)  # else another may follow it
    rank = Rank(spec, transport, token, marks, own_address)
    group = RankGroup(rank, gateway.removeprefix("ipc://"))

    def make_shell(publish: Callable[[dict[str, Any], dict[str, Any]], None]) -> Shell:
        if is_light:
            from monarch_kernel.runtime.worker.light_shell import LightShell

            return LightShell(group.namespace(), publish, rank.main.own_code, rank.main.raise_if_interrupted)
        from monarch_kernel.runtime.worker.cell_shell import CellShell

        return CellShell(group.namespace(), publish, raise_if_interrupted=rank.main.raise_if_interrupted)

    rank.use_shell(make_shell)
    extent = Extent(dict(spec.axes))
    places = range(spec.proc - spec.rank, spec.proc - spec.rank + spec.world_size)
    mesh = ProcMesh(rank.peers, Region.whole(extent), places, spec.mesh, extent)
    PROCESS.client, PROCESS.proc = rank.peers, mesh.process(spec.rank)
    PROCESS.python = "" if spec.python == SAME else spec.python
    install_all(rank)
    host_actors(rank, spec.rank, mesh)
    rank.serve(helper)


def _reader_of(gateway: str, proc: int, secret: str) -> ReaderOf | None:
    """What the agent says that it has read of this rank; None if it says nothing."""
    from monarch_kernel.runtime.host.read_counts import ReaderOf

    try:
        return ReaderOf(os.path.dirname(gateway.removeprefix("ipc://")), proc, secret)
    except OSError:
        return None


def main() -> None:
    """Run the role that the command line names."""
    role = sys.argv[1]
    if role == "agent":
        run_agent()
    elif role == "zygote":
        from monarch_kernel.runtime.host.zygote import serve

        serve(int(sys.argv[2]))
    elif role == "rank":
        from monarch_kernel.runtime.host.zygote import run_fresh

        run_fresh(int(sys.argv[2]))
    else:
        raise SystemExit(f"unknown role {role!r}")


if __name__ == "__main__":
    main()
