"""The driver process of a `RayLauncher`, which talks to Ray: ``python -m monarch_kernel.launch.ray.driver FD``.

Theory of operation
===================

For Ray this process is a driver with its own job. Everything that it creates in Ray belongs to that job, and ends with this
process, however it ends. It exchanges lines of JSON with the launcher over a socket.

*Placing.* Hosts that are requested together are obtained together: a placement group with one bundle for each host and the
strategy ``STRICT_SPREAD`` waits for the resources of all, and shows the demand to an autoscaler. The group only serves to
choose nodes. When it has them, the driver creates an `AgentActor` for each host: an actor that is bound to the node and takes
the resources of the bundle. As soon as these actors are queued for the resources, the driver removes the group. If the actors
lived in the group, it would request another node when one dies; the mesh does that itself, sooner, and a group can't be made
smaller. (Besides, while the resources of such a group are in use elsewhere, the head of Ray 2.60 retries it 100,000 times a
second.)

The driver uses a placement group of the user, or nodes with actors of the user, as they are, and never removes them.

*Running.* The actor starts the agent as its child, passes it the config, and reports its output and its end. It is never
restarted: the controller decides what follows a failure. The config is an argument of a method, because Ray's head stores the
arguments of constructors. The parent-death signal binds the agent to the actor's process, and ranks to their agent. What they
leave behind becomes a child of the actor, and ends with it.

*Ending.* The driver ends all hosts when the launcher orders it. If the launcher closes the socket without that order, its
process has ended; then the driver runs for as long as agents do. Agents end by themselves when they have had no controller for
long enough, unless they are detached.

Ray takes about 15 s to notice that a node is dead, and until then lists it as alive. So the driver does not reuse a node whose
actor does not answer before Ray has given the node up, and keeps asking that actor until then.
"""

from __future__ import annotations

import sys

# ``python -m`` puts the working directory first on the path, where the user may have a ``ray.py``.
if __name__ == "__main__" and sys.path and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.base.text import plural
from monarch_kernel.launch.ray.cluster import Cluster, Node, amount, explain, in_numbers
from monarch_kernel.launch.ray.options import Options
from monarch_kernel.launch.text import how_ended

__all__ = ["RayDriver", "main"]

_WATCH_S = 20.0
_LOOK_S = 0.1
_RETRY_S = 1.0
_QUEUED_S = 0.1
_FORCE_S = 6.0
_ROOM_S = 30.0
_LINE_NBYTES = 1 << 26


@dataclass
class _Host:
    """A host that the launcher requested.

    Attributes:
        id: the launcher's id of the host.
        config: the config of its agent.
        actor: its actor, once it has been placed.
        node: the id of its node, once it has been placed.
        place: index in the places that the user gave; -1 if there are none.
        task: the task that watches it.
        is_up: whether its agent was started.
        is_silent: whether the last attempt to reach its actor failed.
        is_closed: whether the launcher has closed it.
        is_given_back: whether its node can take another host.
        ended: why it ended.
    """

    id: int
    config: bytes
    actor: Any = None
    node: str = ""
    place: int = -1
    task: asyncio.Task[None] | None = None
    is_up: bool = False
    is_silent: bool = False
    is_closed: bool = False
    is_given_back: bool = False
    ended: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class _NeverError(Exception):
    """A host can't come up; the text says why."""


class RayDriver:
    """Carries out the orders of a launcher.

    Args:
        cluster: the Ray cluster.
        options: the options of the launcher.
        say: sends a message to the launcher.
    """

    def __init__(self, cluster: Cluster, options: Options, say: Callable[..., None]) -> None:
        self._cluster = cluster
        self._options = options
        self._say = say
        self._hosts: dict[int, _Host] = {}
        self._silent_nodes: set[str] = set()
        self._waits: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # -- orders of the launcher

    def launch(self, configs: Sequence[tuple[int, str]]) -> None:
        """Obtain hosts, and start agents on them."""
        hosts = [_Host(id, config.encode()) for id, config in configs]
        self._hosts |= {host.id: host for host in hosts}
        self._spawn(self._serve(hosts))

    def close(self, id: int, timeout_s: float) -> None:
        """Give a host back, in any state."""
        self._spawn(self._close(self._hosts[id], timeout_s))

    async def end(self, timeout_s: float) -> None:
        """Give all hosts back."""
        await asyncio.gather(*(self._close(host, timeout_s) for host in self._hosts.values()))
        await self._settle()

    async def outlive(self) -> None:
        """Wait, after the launcher is gone, until the agents that run have ended."""
        waiting = [host for host in self._hosts.values() if host.task is None]  # the others may have an agent
        await asyncio.gather(*(self._close(host, 0.0) for host in waiting))
        running = [host.task for host in self._hosts.values() if host.task is not None]
        await asyncio.gather(*running)
        await self.end(0.0)

    # -- placing

    async def _serve(self, hosts: Sequence[_Host]) -> None:
        request = hosts[0].id
        try:
            if self._options.places:
                hosts = await self._place_where_told(request, hosts)
            else:
                hosts = await self._place(request, hosts)
            self._wait_for(request, f"starting {plural(len(hosts), 'worker')}")
            for host in hosts:
                if host.actor is not None:  # else the launcher closed it meanwhile
                    host.task = asyncio.create_task(self._follow(host, host.actor))
            await asyncio.gather(*(host.changed.wait() for host in hosts))
        except _NeverError as error:
            self._ended(hosts, str(error))
        except self._cluster.error as error:
            self._ended(hosts, f"Ray: {explain(error)}")
        finally:
            self._wait_for(request, "")

    async def _place(self, request: int, hosts: Sequence[_Host]) -> list[_Host]:
        """Create actors for the hosts that are still wanted, once there are free nodes for all of them."""
        group, asked = None, None
        bundle = self._options.bundle
        try:
            while wanted := [host for host in hosts if not host.is_closed]:
                nodes = self._cluster.nodes()
                self._silent_nodes &= {node.id for node in nodes}
                held = {host.node for host in self._hosts.values() if host.node and not host.is_given_back}
                taken = frozenset(held | self._silent_nodes | set(self._options.occupied))
                if not in_numbers(len(wanted), bundle, nodes, last_resort := taken | set(self._options.last_resort)):
                    taken = last_resort
                impossible = in_numbers(len(wanted), bundle, nodes, taken)
                if impossible and not self._options.grows:
                    raise _NeverError(impossible)
                if (len(wanted), taken) != asked:
                    if group is not None:
                        self._cluster.remove(group)
                    asked = len(wanted), taken
                    group = self._cluster.reserve(len(wanted), bundle, taken)
                if chosen := self._cluster.chosen(group):
                    for host, node in zip(wanted, chosen):
                        host.node = node
                        self._make_actor(host, self._cluster.on_node(node))
                    await asyncio.sleep(_QUEUED_S)
                    return wanted
                self._wait_for(request, impossible or self._scarcity(len(wanted), nodes, taken))
                await asyncio.sleep(_LOOK_S)
            return []
        finally:
            if group is not None:
                self._cluster.remove(group)

    def _scarcity(self, count: int, nodes: Sequence[Node], taken: frozenset[str]) -> str:
        bundle = self._options.bundle
        able = [node for node in nodes if node.has(bundle) and node.id not in taken]
        free = sum(node.has_free(bundle) for node in able)
        if free >= count:
            return "placing"
        return f"{plural(count, 'host')} with {amount(bundle, bundle)} (free on {free} of {plural(len(able), 'node')})"

    async def _place_where_told(self, request: int, hosts: Sequence[_Host]) -> list[_Host]:
        """Create actors in the places that the user gave, once no other host of this launcher uses them."""
        places = self._options.places
        what = "bundle" if self._options.group else "node"
        deadline = time.monotonic() + _ROOM_S
        while wanted := [host for host in hosts if not host.is_closed]:
            used = {host.place for host in self._hosts.values() if not (host.is_closed or host.ended)}
            free = [place for place in range(len(places)) if place not in used]
            if len(wanted) <= len(free):
                for host, place in zip(wanted, free):
                    host.place = place
                    node, _ = places[place]
                    group = self._options.group
                    where = self._cluster.in_bundle(group, place) if group else self._cluster.on_node(node)
                    self._make_actor(host, where)
                return wanted
            room = f"asked for {plural(len(wanted), 'host')}; the program has {plural(len(places), what)} for them"
            if len(wanted) > len(places) or time.monotonic() > deadline:
                raise _NeverError(f"{room}, but {len(places) - len(free)} of these are in use" if used - {-1} else room)
            self._wait_for(request, f"waiting for a {what} without another host")
            await asyncio.sleep(_LOOK_S)
        return []

    def _make_actor(self, host: _Host, where: Any) -> None:
        host.actor = self._cluster.make_actor(where, self._options.bundle, self._options.runtime_env)

    # -- running

    async def _follow(self, host: _Host, actor: Any) -> None:
        """Start the agent, and report its output until it ends."""
        gpus = self._options.places[host.place][1] if host.place >= 0 else None
        if gpus is None and not self._options.bundle.get("GPU"):
            gpus = ""  # other Ray workers may use them
        try:
            address, pid = await actor.start.remote(host.config, self._options.command, gpus)
        except self._cluster.error as error:
            await self._give_back(host, 0.0)
            self._ended([host], f"Ray could not start it: {explain(error)}")
            return
        host.is_up = True
        host.changed.set()
        self._say(host=host.id, node=host.node)
        what, seen = f"the host agent (pid {pid} on node {address})", 0
        while not host.is_closed:
            try:
                seen, lines, port, code = await actor.watch.remote(seen, _WATCH_S)
            except self._cluster.unavailable:
                host.is_silent = True
                await asyncio.sleep(_RETRY_S)
            except self._cluster.error as error:
                host.is_up = False
                await self._give_back(host, 0.0)
                self._ended([host], f"{what} is gone; Ray: {explain(error)}")
                return
            else:
                host.is_silent = False
                self._say(host=host.id, log=lines, address=f"tcp://{address}:{port}" if port else "")
                if code is not None:
                    await self._give_back(
                        host, 0.0
                    )  # before reporting the end: the launcher may request a replacement at once
                    self._ended([host], f"{what} {how_ended(code)}")
                    return

    # -- ending

    async def _close(self, host: _Host, timeout_s: float) -> None:
        if not host.is_closed:
            host.is_closed = True
            host.changed.set()
            await self._give_back(host, timeout_s)
        self._say(host=host.id, closed=True)

    async def _give_back(self, host: _Host, timeout_s: float) -> None:
        """End the agent if it can be reached, and kill the actor in any case."""
        actor, host.actor = host.actor, None
        if actor is None:
            return
        if host.is_up and not host.is_silent:
            try:
                await asyncio.wait_for(_result(actor.end.remote(timeout_s)), timeout_s + _FORCE_S)
            except (asyncio.TimeoutError, self._cluster.error):
                host.is_silent = True
        if host.is_silent and host.node:
            self._silent_nodes.add(host.node)
        host.is_given_back = True
        with contextlib.suppress(self._cluster.error):
            self._cluster.kill(actor)

    def _ended(self, hosts: Sequence[_Host], why: str) -> None:
        """Report the end of hosts, except of those that are being given back: `_close` kills their actors on purpose."""
        for host in hosts:
            if not host.ended and not host.is_closed:
                host.ended = why
                host.changed.set()
                self._say(host=host.id, ended=why)

    # -- tasks

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _settle(self) -> None:
        await asyncio.gather(*self._tasks, *(host.task for host in self._hosts.values() if host.task is not None))

    def _wait_for(self, request: int, what: str) -> None:
        if self._waits.get(request, "") != what:
            self._waits[request] = what
            self._say(progress="; ".join(dict.fromkeys(filter(None, self._waits.values()))))


async def _result(reference: Any) -> Any:
    return await reference


async def _run(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=_LINE_NBYTES)

    def say(**message: Any) -> None:
        if not writer.is_closing():
            writer.write(json.dumps(message).encode() + b"\n")

    options = Options(**json.loads(await reader.readline()))
    say(progress=f"connecting to {options.address}")
    await writer.drain()
    try:
        cluster = await Cluster.connect(options.address)
    except (ConnectionError, ImportError, RuntimeError, ValueError, TimeoutError) as error:
        say(failed=explain(error))
        writer.close()
        await writer.wait_closed()
        return
    say(progress="")
    driver = RayDriver(cluster, options, say)
    try:
        while line := await reader.readline():
            order = json.loads(line)
            if "launch" in order:
                driver.launch(order["launch"])
            elif "close" in order:
                driver.close(order["close"], order["timeout_s"])
            else:
                await driver.end(order["timeout_s"])
                return
        await driver.outlive()
    finally:
        cluster.disconnect()


def main() -> None:
    """Serve the launcher at the other end of a socket."""
    asyncio.run(_run(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
