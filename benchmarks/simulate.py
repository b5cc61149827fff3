"""A simulation of up to 10,000 ranks: the controller and the relays are real; hosts, ranks and the network are simulated.

``python -m benchmarks.simulate`` writes ``docs/scale/simulated.json`` and ``simulated.svg``.

The parts that determine the results are real: the controller (`Runtime`, `State`, its loop and codec), and one `Relay` for it
and for each agent, with their fan-out, folding and tree. The simulation measures their processor time and advances its clock by
it. The parts that they would wait for are simulated: sockets, pipes, forks and ranks have the costs that `measure_costs` has
just measured on this machine; the latency and the bandwidth of the network are parameters. Each rank and each agent has its own
core, and each host has one link to the network, which sends one message after the other.

The simulation leaves out loss of messages and beats of hosts, which always cost the controller the same few milliseconds a
second.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import itertools
import json
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import monarch_kernel.actor
from benchmarks.costs import Costs, measure_costs
from benchmarks.machine import describe_machine
from benchmarks.plot import Chart, Curve, draw
from benchmarks.scale import FOLDER, Echo
from monarch_kernel.actor import endpoint
from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.errors import SupervisionError
from monarch_kernel.net.hosts.gateway import FOLD_S, NEIGHBOUR_SILENT_S
from monarch_kernel.net.hosts.relay import CONTROLLER_HOST, Relay
from monarch_kernel.net.hosts.zmq import BEAT_S
from monarch_kernel.net.memory.counters import Meters
from monarch_kernel.net.transport.base import CONTROLLER, Peer, Senders, host_peer, place_of, proc_of, rank_peer
from monarch_kernel.net.wire.codec import Frame, dump, join, pack, split
from monarch_kernel.net.wire.messages import (
    Call,
    Hello,
    HostHello,
    Output,
    OutputChunk,
    Payload,
    Ping,
    RankSpec,
    Result,
    Run,
    Spawn,
    StartRanks,
    UseParent,
)
from monarch_kernel.runtime.controller import host_tree as placing
from monarch_kernel.runtime.controller import output_order
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.host.output import fold
from monarch_kernel.runtime.host.rank_output import FOLD_S as FOLD_OUTPUT_S
from monarch_kernel.runtime.host.rank_output import OUTPUT_EVERY_S

__all__ = ["Simulation", "simulate"]

TOKEN = "simulated"
SIZES = [(5, 20), (15, 20), (50, 20), (150, 20), (500, 20)]
FAN_OUT = placing.FAN_OUT
LOST_AFTER_S = 1.0
CONNECT_LATENCIES = 6
"""Messages that cross the network, one after the other, until two hosts are connected."""


class Simulation:
    """The clock, the scheduled events, and the network.

    Attributes:
        now: the time, in seconds.
        carried: numbers of messages and bytes between hosts.
    """

    def __init__(self, costs: Costs, latency_s: float, bytes_per_s: float) -> None:
        self.costs = costs
        self.now = 0.0
        self.carried = [0, 0]
        self.agents: dict[int, Agent] = {}
        self.controller = ControllerEnd(self)
        self.latency_s = latency_s
        self._byte_s = costs.tcp_byte_s + 1 / bytes_per_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._link_free: dict[int, float] = {}

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Schedule an event."""
        heapq.heappush(self._events, (when, next(self._order), do))

    def run_until(self, when: float) -> None:
        """Run all events up to this time."""
        while self._events and self._events[0][0] <= when:
            self.now, _, do = heapq.heappop(self._events)
            do()

    def next(self) -> bool:
        """Run the next event; False if there is none."""
        if not self._events:
            return False
        self.now, _, do = heapq.heappop(self._events)
        do()
        return True

    def carry(self, source: int, target: int, parts: Sequence[Frame], when: float) -> None:
        """Send a message from one host to another."""
        nbytes = sum(len(part) for part in parts)
        self.carried[0] += 1
        self.carried[1] += nbytes
        leaves = max(when, self._link_free.get(source, 0.0)) + self.costs.tcp_s + nbytes * self._byte_s
        self._link_free[source] = leaves
        arrives = leaves + self.latency_s
        copies: list[Frame] = [memoryview(bytearray(part)) if i else bytes(part) for i, part in enumerate(parts)]
        if target == CONTROLLER_HOST:
            self.at(arrives, lambda: self.controller.arrive(source, copies))
        elif target in self.agents:
            self.at(arrives, lambda: self.agents[target].arrive(source, copies))


class Agent:
    """A host: the real `Relay`, and simulated ranks that answer after some time."""

    def __init__(self, simulation: Simulation, host: int) -> None:
        self.relay = Relay(host, 0, default=CONTROLLER_HOST)
        self.relay.greet(CONTROLLER_HOST)
        self.is_lost = False
        self.parent = CONTROLLER_HOST
        self._host = host
        self._name = host_peer(host)
        self._sim = simulation
        self._busy_until = 0.0
        self._expected = 0
        self._fold_until = 0.0
        self._chunks: list[list[OutputChunk]] = []
        self._rank_busy: dict[Peer, float] = {}
        self._answers: dict[tuple[int, int], list[Frame]] = {}
        self.procs: list[int] = []

    def do(self, work: Callable[[], int], also_s: float = 0.0) -> None:
        """Do work that gives the number of small messages to ranks, and add its real processor time to this agent's time."""
        begin = max(self._sim.now, self._busy_until)
        self._busy_until = begin
        before = time.thread_time()
        sent = work()
        took = time.thread_time() - before
        self._busy_until = begin + took + sent * self._sim.costs.ipc_s + also_s

    def say_hello(self) -> None:
        """Send the first message, once the agent has started."""
        hello = HostHello(TOKEN, self._host, f"host{self._host}", 1, 64, 0, (), ("tcp://10.0.0.1:1",))
        self.do(lambda: self._send(pack(hello)))
        self._flush()

    def arrive(self, neighbour: int, parts: list[Frame]) -> None:
        """Handle a message from another host."""
        if not self.is_lost:
            nbytes = sum(len(part) for part in parts)
            self.do(lambda: self._handle(neighbour, parts), self._sim.costs.tcp_s + nbytes * self._sim.costs.tcp_byte_s)
            self._turn()

    def _handle(self, neighbour: int, parts: list[Frame]) -> int:
        to_ranks = 0
        for _, _, receivers, frames in self.relay.receive(neighbour, parts):
            if receivers == [self._name]:
                for message, _ in split(frames):
                    self._handle_own(message)
                continue
            if len(receivers) > 1:
                self._expected = len(receivers)
                self._fold_until = self._sim.now + FOLD_S
            asked = [message for message, _ in split(frames)]
            nbytes = sum(len(frame) for frame in frames)
            each_s = self._sim.costs.ipc_s + nbytes * self._sim.costs.ipc_byte_s
            for i, receiver in enumerate(receivers):
                self._sim.at(
                    max(self._sim.now, self._busy_until) + (i + 1) * each_s, partial(self._ask, receiver, asked)
                )
            to_ranks += len(receivers)
        return to_ranks

    def _handle_own(self, message: object) -> None:
        if isinstance(message, StartRanks):
            for i, spec in enumerate(message.specs):
                self.procs.append(spec.proc)
                hello = Hello(TOKEN, spec.proc, 1000 + spec.proc, "cpu", address=f"ipc:///tmp/R{spec.proc}")
                up_at = self._sim.now + (i + 1) * self._sim.costs.fork_s
                self._sim.at(up_at, partial(self._from_rank, rank_peer(spec.proc), join([pack(hello)])))
        elif isinstance(message, UseParent):
            parent = message.parent
            self._sim.at(self._sim.now + CONNECT_LATENCIES * self._sim.latency_s, lambda: self.join(parent))

    def join(self, parent: int) -> None:
        """Use another host as parent, once the connection to it is up."""
        self.relay.lead_by(self.parent, parent)
        self.parent = parent
        self.beat()

    def beat(self) -> None:
        """Report that the agent is alive, and which messages it has."""
        self.relay.beat()
        self._flush()

    def _ask(self, rank: Peer, asked: Sequence[object]) -> None:
        """Handle messages to a rank, and schedule its answers."""
        if self.is_lost:
            return
        at = max(self._sim.now, self._rank_busy.get(rank, 0.0))
        for message in asked:
            if isinstance(message, (Call, Ping, Run, Spawn)):
                is_cell = isinstance(message, Run)
                at += self._sim.costs.rank_cell_s if is_cell else self._sim.costs.rank_call_s
                if message.id:
                    self._sim.at(at, partial(self._answer, rank, message.id, message))
        self._rank_busy[rank] = at

    def _answer(self, rank: Peer, id: int, message: object) -> None:
        mark, differs = 0, 0
        if isinstance(message, Run):
            mark = 2 * id
            self._wrote(proc_of(rank), mark)
        elif isinstance(message, Call) and message.method == "differs":
            differs = proc_of(rank)
        frames = self._answers.get((id, differs))
        if frames is None:
            payload = dump(differs)[0] if isinstance(message, Call) else Payload()
            frames = join([pack(Result(id, payload, {}, (mark, mark), -1))])
            self._answers = {(id, differs): frames}
        self._from_rank(rank, frames)

    def _wrote(self, proc: int, mark: int) -> None:
        if not self._chunks:
            wait_s = min(FOLD_OUTPUT_S * len(self.procs), OUTPUT_EVERY_S)
            self._sim.at(self._sim.now + wait_s, self._send_output)
        line = OutputChunk(proc, "stdout", "the same on all ranks\n", mark)
        self._chunks.append([line, OutputChunk(proc, "stderr", "", mark)])

    def _send_output(self) -> None:
        if not self.is_lost:
            chunks, self._chunks = self._chunks, []
            pipes_s = len(chunks) * self._sim.costs.pipe_s
            self.do(lambda: self._send(pack(Output(tuple(fold(chunks))))), pipes_s)
            self._flush()

    def _send(self, packed: object) -> int:
        self.relay.send(self._name, CONTROLLER, CONTROLLER_HOST, join([packed]))  # type: ignore[list-item]
        return 0

    def _from_rank(self, rank: Peer, frames: list[Frame]) -> None:
        if self.is_lost:
            return

        def pass_on() -> int:
            self.relay.send(rank, CONTROLLER, CONTROLLER_HOST, list(frames))  # a copy, as if it was received
            return 1

        self.do(pass_on)
        self._turn()

    def _turn(self) -> None:
        """Send messages or wait for more to fold, as `Gateway.turn` does."""
        if not self.relay.waits:
            return
        if self.relay.senders >= self._expected or self._sim.now >= self._fold_until:
            self._flush()
        else:
            self._sim.at(self._fold_until, self._turn)

    def _flush(self) -> None:
        self._expected = 0
        ready: list[tuple[int, list[Frame]]] = []

        def work() -> int:
            ready.extend(self.relay.flush())
            return 0

        self.do(work)
        for neighbour, parts in ready:
            self._sim.carry(self._host, neighbour, parts, self._busy_until)


class ControllerEnd:
    """The transport of the controller: its relay is real, and the clock advances while the controller's code runs.

    Attributes:
        clock: time of the controller.
        spent_s: processor time of the controller.
        sockets_s: additional processor time that its sockets would have taken.
    """

    refused = 0

    def __init__(self, simulation: Simulation) -> None:
        self.clock = self.spent_s = self.sockets_s = 0.0
        self.meters = Meters(place_of(CONTROLLER))
        self._sim = simulation
        self._relay = Relay(CONTROLLER_HOST, 0)
        self._homes: dict[Peer, int] = {}
        self._inbox: deque[tuple[float, int, list[Frame]]] = deque()
        self._arrived: deque[tuple[Senders, list[Frame]]] = deque()
        self._main = threading.get_ident()
        self._mark = time.thread_time()
        self._woken = threading.Event()

    def arrive(self, neighbour: int, parts: list[Frame]) -> None:
        """Handle a message from a host."""
        self._inbox.append((self._sim.now, neighbour, parts))

    # -- the controller's time

    def _leave(self) -> None:
        """Leave the controller's code, and add its processor time to the clock."""
        if threading.get_ident() == self._main:
            took = time.thread_time() - self._mark
            self.spent_s += took
            self.clock += took

    def _enter(self) -> None:
        if threading.get_ident() == self._main:
            self._mark = time.thread_time()

    def begin(self) -> tuple[float, float, float]:
        """Start to measure an operation."""
        self.clock = max(self.clock, self._sim.now)
        self._enter()
        return self.clock, self.spent_s, self.sockets_s

    def end(self, started: tuple[float, float, float]) -> dict[str, float]:
        """End an operation; gives its costs."""
        self._leave()
        self._enter()
        return {
            "ms": 1e3 * (self.clock - started[0]),
            "controller_ms": 1e3 * (self.spent_s - started[1]),
            "sockets_ms": 1e3 * (self.sockets_s - started[2]),
        }

    # -- the transport interface

    def send(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        """Send a message."""
        home = self._homes.get(peer)
        if home is None:
            return False
        self._relay.send(CONTROLLER, peer, home, parts)
        return True

    def flush(self) -> None:
        """Send the queued messages for other hosts."""
        if self._relay.waits:
            ready = self._relay.flush()
            self._leave()
            for neighbour, parts in ready:
                self.clock += self._sim.costs.tcp_s
                self.sockets_s += self._sim.costs.tcp_s
                self._sim.carry(CONTROLLER_HOST, neighbour, parts, self.clock)
            self._enter()

    def recv(self) -> tuple[Senders, list[Frame]] | None:
        """Give the next message that has arrived by now."""
        if not self._arrived:
            self._leave()
            if threading.get_ident() == self._main:
                self._sim.run_until(self.clock)
            self._enter()
            if not self._inbox or self._inbox[0][0] > self.clock:
                self.flush()
                return None
            _, neighbour, parts = self._inbox.popleft()
            self.clock += self._sim.costs.tcp_s
            self.sockets_s += self._sim.costs.tcp_s
            for _, senders, _, frames in self._relay.receive(neighbour, parts):
                self._arrived.append((tuple(senders) if len(senders) > 1 else senders[0], frames))
            if not self._arrived:
                return self.recv()
        return self._arrived.popleft()

    def wait(self, timeout_s: float | None) -> None:
        """Advance the time until a message arrives; threads other than the main one never get any."""
        if threading.get_ident() != self._main:
            self._woken.wait(timeout_s)
            self._woken.clear()
            return
        self._leave()
        is_idle = False
        while not self._inbox and not self._woken.is_set() and not is_idle:
            is_idle = not self._sim.next()
        self._woken.clear()
        if is_idle:  # the controller waits for something other than hosts
            time.sleep(0.0005)
        else:
            self.clock = max(self.clock, self._inbox[0][0] if self._inbox else self._sim.now)
        self._enter()

    def wake(self) -> None:
        """Wake another thread."""
        self._woken.set()

    def beat(self) -> None:
        """Tell all hosts what was sent, so that they notice missing messages."""
        self._relay.beat()
        for neighbour, parts in self._relay.flush():
            self._sim.carry(CONTROLLER_HOST, neighbour, parts, max(self.clock, self._sim.now))

    def route(self, peer: Peer, host: int) -> None:
        """Note the host of a process."""
        self._homes[peer] = host
        self._relay.greet(host)

    def dial(self, host: int, address: str) -> None:
        """Do nothing, since agents connect to the controller."""

    def active_hosts(self) -> set[int]:
        """All hosts, since the real clock says nothing about them."""
        return set(self._sim.agents)

    def give_up(self, host: int) -> None:
        """Forget a host that is gone."""
        self._relay.give_up(host)

    def forget(self, peer: Peer) -> None:
        """Do nothing, since no memory is shared."""

    def close(self) -> None:
        """Do nothing."""

    def silence(self, for_s: float) -> None:
        """Let time pass without any message."""
        self._sim.run_until(self.clock + for_s)
        self.clock += for_s


def simulate(hosts: int, per_host: int, costs: Costs, latency_s: float, bytes_per_s: float) -> dict[str, float]:
    """Start this many ranks, measure all operations, and lose a host."""
    world = hosts * per_host
    sim = Simulation(costs, latency_s, bytes_per_s)
    end = sim.controller
    runtime = Runtime(end, TOKEN)
    figures: dict[str, float] = {"hosts": hosts, "per_host": per_host, "ranks": world}
    extent = Extent({"hosts": hosts, "procs": per_host})

    def note(name: str, taken: dict[str, float]) -> None:
        figures.update({f"{name}_{key}": value for key, value in taken.items()})

    try:
        started = end.begin()
        procs = runtime.new_procs(world)
        for host in range(1, hosts + 1):
            sim.agents[host] = Agent(sim, host)
            sim.at(costs.agent_up_s, sim.agents[host].say_hello)
            runtime.enter(partial(runtime.host_pool._expect, host, None, LOST_AFTER_S))
            runtime.start_ranks(host, _specs(procs, host, per_host, extent))
        mesh = ProcMesh(runtime, Region.whole(extent), procs, "simulated", extent)
        mesh.initialized.get()
        note("up", end.end(started))
        while sim.next():  # runs all remaining events
            pass
        figures["direct_hosts"] = sum(not record.parent for record in runtime._state.hosts.values())
        actors = mesh.spawn("echo", _Differing)
        actors.initialized.get()
        gc.collect()
        gc.freeze()  # the simulation's own objects do not count as the controller's

        def median(name: str, do: Callable[[], object], times: int = 5) -> None:
            do()
            taken, carried = [], []
            for _ in range(times):
                before = list(sim.carried)
                started = end.begin()
                do()
                taken.append(end.end(started))
                carried.append([after - then for after, then in zip(sim.carried, before)])
            note(name, {key: statistics.median(one[key] for one in taken) for key in taken[0]})
            figures[f"{name}_messages"] = statistics.median(one[0] for one in carried)
            figures[f"{name}_mb"] = statistics.median(one[1] for one in carried) / 1e6

        def broadcasts() -> None:
            for _ in range(10):
                actors.echo.broadcast(1)
            actors.echo.call(1).get()

        median("call", lambda: actors.echo.call(1).get())
        median("call_with_own_values", lambda: actors.differs.call(1).get())
        median("broadcasts", broadcasts)
        figures["broadcast_controller_ms"] = (figures["broadcasts_controller_ms"] - figures["call_controller_ms"]) / 10
        megabyte = bytes(1 << 20)
        median("megabyte", lambda: actors.take.call(megabyte).get(), 3)
        heard: list[object] = []
        median("printing_cell", lambda: mesh.run_cell("print(1)", cell=1, listen=heard.append).get())
        assert len(heard) == 6 * world, f"{len(heard)} pieces of output came"

        # The lost host is the one on which most others depend.
        followers: dict[int, list[int]] = {host: [] for host in range(hosts + 1)}
        for record in runtime._state.hosts.values():
            followers[record.parent].append(record.host)
        lost = max(range(1, hosts + 1), key=lambda host: len(_all_below(host, followers)))
        below = _all_below(lost, followers)
        figures["below_lost"] = len(below)
        started = end.begin()
        future = actors.echo.call(1)
        sim.agents[lost].is_lost = True
        for follower in followers[lost]:
            back_at = started[0] + NEIGHBOUR_SILENT_S + CONNECT_LATENCIES * latency_s
            sim.at(back_at, partial(sim.agents[follower].join, CONTROLLER_HOST))
        for i in range(1, 1 + int((NEIGHBOUR_SILENT_S + 1.0) / BEAT_S)):
            for one in below:
                sim.at(started[0] + i * BEAT_S, sim.agents[one].beat)
            sim.at(started[0] + i * BEAT_S, end.beat)
        lost_at = started[0] + LOST_AFTER_S
        sim.at(lost_at, partial(runtime.enter, lambda now: runtime._state.processes.host_gone(lost, "silent", (), now)))
        try:
            future.get()
        except SupervisionError as error:
            assert len(error.reports) == per_host, "other ranks failed, too"
        else:
            raise AssertionError("no call noticed the loss of the host")
        note("loss", end.end(started))
        end.silence(LOST_AFTER_S)
        rest = actors.slice(hosts=slice(0, lost - 1)) if lost == hosts else actors.slice(hosts=slice(lost, hosts))
        figures["ranks_after_loss"] = len(rest)
        median("call_after_loss", lambda: rest.echo.call(1).get(), 3)
    finally:
        gc.unfreeze()
        sim.agents.clear()
        runtime.close()
    return figures


class _Differing(Echo):
    @endpoint
    def differs(self, value: int) -> int:
        return value


def _all_below(host: int, followers: Mapping[int, Sequence[int]]) -> list[int]:
    """The hosts whose messages pass through this one."""
    return [each for one in followers[host] for each in (one, *_all_below(one, followers))]


def _specs(procs: Sequence[int], host: int, per_host: int, extent: Extent) -> list[RankSpec]:
    return [
        RankSpec(
            proc=procs[rank],
            rank=rank,
            world_size=len(procs),
            local_rank=rank % per_host,
            local_world_size=per_host,
            axes=tuple(extent.items()),
            mesh="simulated",
            device="cpu",
            threads=1,
            env={},
            cwd="/",
            sys_path=(),
        )
        for rank in range((host - 1) * per_host, host * per_host)
    ]


def plot(rows: Sequence[dict[str, float]]) -> str:
    """Plot flat and tree side by side, over the number of ranks."""

    def curves(names: Sequence[tuple[str, str]]) -> list[Curve]:
        found = []
        for i, (label, key) in enumerate(names):
            for is_tree in (1, 0):
                points = [(row["ranks"], row[key]) for row in rows if row["is_tree"] == is_tree and key in row]
                found.append(Curve(f"{label}, {'tree' if is_tree else 'flat'}", points, not is_tree, i))
        return found

    label = "ranks, 20 on each host"
    operations = [("call", "call_"), ("cell", "printing_cell_"), ("1 MiB to all", "megabyte_")]
    return draw(
        [
            Chart("simulated time, ms", label, curves([(name, f"{key}ms") for name, key in operations])),
            Chart(
                "processor time of the controller, ms",
                label,
                curves([(name, f"{key}controller_ms") for name, key in operations]),
            ),
        ],
        columns=2,
    )


def size(text: str) -> tuple[int, int]:
    """Parse ``500x20``."""
    hosts, _, ranks = text.partition("x")
    return int(hosts), int(ranks)


def main() -> None:
    """Measure the costs, then simulate all sizes, flat and as a tree."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default="", help="sizes, such as 50x20,500x20; default: those of the plot")
    parser.add_argument("--latency-us", type=float, default=50.0, help="one-way latency of the network; default: 50")
    parser.add_argument("--gbit-per-s", type=float, default=10.0, help="bandwidth of each host's link; default: 10")
    parser.add_argument("--out", type=Path, default=FOLDER, help=f"folder for figures and plot; default: {FOLDER}")
    options = parser.parse_args()
    sizes = [size(text) for text in options.sizes.split(",") if text] or SIZES
    monarch_kernel.actor.unhandled_fault_hook = lambda failure: None
    output_order.OUTPUT_GRACE_S = (
        600.0  # in seconds of the real clock; the simulation takes much longer than it simulates
    )
    machine = describe_machine([])
    costs = measure_costs()
    rows = []
    for hosts, per_host in sizes:
        for is_tree in (True, False):
            placing.FAN_OUT = FAN_OUT if is_tree else 1 << 30
            figures = simulate(hosts, per_host, costs, options.latency_us / 1e6, options.gbit_per_s * 1e9 / 8)
            rows.append({"is_tree": int(is_tree), **figures})
            print(
                f"{hosts:3} hosts x {per_host}, {'tree' if is_tree else 'flat'}: up {figures['up_ms'] / 1e3:.2f} s "
                f"(controller {figures['up_controller_ms']:.0f} ms), call {figures['call_ms']:.1f} ms "
                f"({figures['call_controller_ms']:.1f}), own values {figures['call_with_own_values_ms']:.1f} "
                f"({figures['call_with_own_values_controller_ms']:.1f}), cell {figures['printing_cell_ms']:.1f} "
                f"({figures['printing_cell_controller_ms']:.1f}), 1 MiB {figures['megabyte_ms']:.0f} "
                f"({figures['megabyte_controller_ms']:.1f}), loss {figures['loss_ms']:.0f} "
                f"({figures['loss_controller_ms']:.1f})",
                flush=True,
            )
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {"latency_us": options.latency_us, "gbit_per_s": options.gbit_per_s, "fan_out": FAN_OUT}
    data = {"machine": asdict(machine), "settings": settings, "costs": asdict(costs), "sizes": rows}
    (options.out / "simulated.json").write_text(json.dumps(data, indent=1) + "\n")
    (options.out / "simulated.svg").write_text(plot(rows))


if __name__ == "__main__":
    main()
