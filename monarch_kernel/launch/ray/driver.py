"""The process that talks to Ray for a `RayLauncher`: ``python -m monarch_kernel.launch.ray.driver FD``.

Theory of operation
===================

To Ray it is a driver, with a job of its own. All that it makes there belongs to that job, and ends with this process, however
that ends. The launcher is at the other end of a socket; lines of JSON go both ways.

*Placing.* Hosts that are asked for together are obtained together: a placement group with one bundle for each and the strategy
``STRICT_SPREAD`` waits for the resources of all, and is what an autoscaler sees. But it only serves to choose nodes. When
it has them, a `Keeper` is made for each host, an actor that is bound to the node and takes what the bundle has; as soon
as these wait for that, the group is removed. If they lived in it, it would ask for another node when one dies: the mesh
does that by itself, sooner, and a group can't be made smaller. (And while another has what such a group asks for, the head of
Ray 2.60 tries it 100,000 times a second.)

A group of the user's own, and nodes where he has actors, are used as they are and never removed.

*Keeping.* A keeper starts the agent as its child, gives it the config, and tells what becomes of it. It is never restarted:
what follows a failure is the controller's to decide. The config goes as an argument of a method, for Ray's head keeps those
of constructors. The agent is bound to the keeper's process by the parent-death signal, and ranks to their agent; what they
leave behind becomes the keeper's child, and ends with it.

*Ending.* When the launcher says so. If it falls silent without that, its process has ended: then this one goes on for as
long as agents do. They end by themselves when they have had no controller for long enough, or not, if they were told to
outlive it.

Ray needs some 15 s to find out that a node is dead, and until then says that it lives. So a node whose keeper does not
answer is not used again before Ray has given it up, and such a keeper is asked again until then.
"""

from __future__ import annotations

import sys

# ``python -m`` puts the working directory first on the path, where a user's own ``ray.py`` may lie.
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

from monarch_kernel.launch.ray.cluster import Cluster, Node, amount, explain, in_numbers
from monarch_kernel.launch.ray.options import Options
from monarch_kernel.launch.text import how_ended, plural

__all__ = ["Driver", "main"]

_WATCH_S = 20.0
_LOOK_S = 0.1
_RETRY_S = 1.0
_QUEUED_S = 0.1
_FORCE_S = 6.0
_ROOM_S = 30.0
_LINE_NBYTES = 1 << 26


@dataclass
class _Host:
    """One host that was asked for.

    Attributes:
        id: the launcher's.
        config: of its agent.
        keeper: its actor, once it has been placed.
        node: on which.
        place: number of the user's place, if he has told where.
        task: that follows it.
        is_up: whether an agent was started.
        is_silent: whether its keeper could not be reached last.
        is_closed: whether the launcher wants it no more.
        is_given_back: whether its node can take another.
        ended: why it has ended.
    """

    id: int
    config: bytes
    keeper: Any = None
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
    """A host will never come; the text says why."""


class Driver:
    """Does what a launcher says.

    Args:
        cluster: where.
        options: of the launcher.
        say: sends it a message.
    """

    def __init__(self, cluster: Cluster, options: Options, say: Callable[..., None]) -> None:
        self._cluster = cluster
        self._options = options
        self._say = say
        self._hosts: dict[int, _Host] = {}
        self._silent_nodes: set[str] = set()
        self._waits: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # -- what the launcher says

    def launch(self, configs: Sequence[tuple[int, str]]) -> None:
        """Obtain hosts, and start agents on them."""
        hosts = [_Host(id, config.encode()) for id, config in configs]
        self._hosts |= {host.id: host for host in hosts}
        self._spawn(self._serve(hosts))

    def close(self, id: int, timeout_s: float) -> None:
        """Give a host back, whatever state it is in."""
        self._spawn(self._close(self._hosts[id], timeout_s))

    async def end(self, timeout_s: float) -> None:
        """Give all hosts back."""
        await asyncio.gather(*(self._close(host, timeout_s) for host in self._hosts.values()))
        await self._settle()

    async def outlive(self) -> None:
        """The launcher is gone: wait until the agents that run have ended."""
        waiting = [host for host in self._hosts.values() if host.task is None]  # else its agent may have come
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
                if host.keeper is not None:  # else it was closed just now
                    host.task = asyncio.create_task(self._follow(host, host.keeper))
            await asyncio.gather(*(host.changed.wait() for host in hosts))
        except _NeverError as error:
            self._ended(hosts, str(error))
        except self._cluster.error as error:
            self._ended(hosts, f"Ray: {explain(error)}")
        finally:
            self._wait_for(request, "")

    async def _place(self, request: int, hosts: Sequence[_Host]) -> list[_Host]:
        """Make keepers for those that are still wanted when there is room for them."""
        group, asked = None, None
        bundle = self._options.bundle
        try:
            while wanted := [host for host in hosts if not host.is_closed]:
                nodes = self._cluster.nodes()
                self._silent_nodes &= {node.id for node in nodes}
                held = {host.node for host in self._hosts.values() if host.node and not host.is_given_back}
                taken = frozenset(held | self._silent_nodes | set(self._options.occupied))
                if not in_numbers(len(wanted), bundle, nodes, doubted := taken | set(self._options.doubted)):
                    taken = doubted
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
                        self._make_keeper(host, self._cluster.on_node(node))
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
        return f"{plural(count, 'host')} with {amount(bundle, bundle)}: that is free on {free} of {plural(len(able), 'node')}"

    async def _place_where_told(self, request: int, hosts: Sequence[_Host]) -> list[_Host]:
        """Make keepers in places that the user has, as soon as nobody else of ours is there."""
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
                    self._make_keeper(host, where)
                return wanted
            room = f"asked for {plural(len(wanted), 'host')}; the program has {plural(len(places), what)} for them"
            if len(wanted) > len(places) or time.monotonic() > deadline:
                raise _NeverError(f"{room}, and {len(places) - len(free)} of these are in use" if used - {-1} else room)
            self._wait_for(request, f"waiting for a {what} that no other host is in")
            await asyncio.sleep(_LOOK_S)
        return []

    def _make_keeper(self, host: _Host, where: Any) -> None:
        host.keeper = self._cluster.keeper(where, self._options.bundle, self._options.runtime_env)

    # -- keeping

    async def _follow(self, host: _Host, keeper: Any) -> None:
        """Start the agent, and tell what is heard of it until it ends."""
        gpus = self._options.places[host.place][1] if host.place >= 0 else None
        if gpus is None and not self._options.bundle.get("GPU"):
            gpus = ""  # they are others'
        try:
            address, pid = await keeper.start.remote(host.config, self._options.command, gpus)
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
                seen, lines, port, code = await keeper.watch.remote(seen, _WATCH_S)
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
                    await self._give_back(host, 0.0)  # first: who hears of the end may ask for another at once
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
        """End the agent if it can be reached, and the keeper in any case."""
        keeper, host.keeper = host.keeper, None
        if keeper is None:
            return
        if host.is_up and not host.is_silent:
            try:
                await asyncio.wait_for(_result(keeper.end.remote(timeout_s)), timeout_s + _FORCE_S)
            except (asyncio.TimeoutError, self._cluster.error):
                host.is_silent = True
        if host.is_silent and host.node:
            self._silent_nodes.add(host.node)
        host.is_given_back = True
        with contextlib.suppress(self._cluster.error):
            self._cluster.kill(keeper)

    def _ended(self, hosts: Sequence[_Host], why: str) -> None:
        """Report the end of hosts, except of those that are being given back: `_close` kills their keepers on purpose."""
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
    driver = Driver(cluster, options, say)
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
