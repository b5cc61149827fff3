"""The agent holds a process's connections while it is alive and a while longer, and closes those that the process closes."""

from __future__ import annotations

import os
import random
import resource
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from monarch_kernel.net.hosts.handshakes import free_descriptors
from monarch_kernel.runtime.host.connection_holder import HOLD_S, LOOK_EVERY_S, FdHolder, FdKeeper
from tests.support.descriptors import open_descriptors
from tests.support.timing import Bar
from tests.support.waiting import LONG_S

Turn = Callable[[Callable[[], object]], None]


@pytest.fixture
def agent(tmp_path: Path) -> str:
    return str(tmp_path / "H0")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The keeper's clock, which advances only when a test adds to `now`."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(
        "monarch_kernel.runtime.host.connection_holder.time",
        SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep),
    )
    return clock


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        yield selector


@pytest.fixture
def keeper(agent: str, selector: selectors.BaseSelector) -> Iterator[FdKeeper]:
    yield FdKeeper(agent, selector)
    for key in list(selector.get_map().values()):
        key.fileobj.close()  # type: ignore[union-attr]


@pytest.fixture
def holder(agent: str, keeper: FdKeeper) -> Iterator[FdHolder]:
    holder = FdHolder(agent)
    yield holder
    if holder._agent is not None:
        holder._agent.close()


@pytest.fixture
def turn(keeper: FdKeeper, selector: selectors.BaseSelector, clock: SimpleNamespace) -> Turn:
    """Run the keeper until a condition holds."""

    def turn(condition: Callable[[], object]) -> None:
        last = time.monotonic() + LONG_S
        while not condition():
            assert time.monotonic() < last
            for key, _ in selector.select(0.01):
                key.data()
            keeper.do_what_is_due(clock.now)

    return turn


def pairs(count: int) -> list[tuple[socket.socket, socket.socket]]:
    """Create TCP connections, which `socket.socketpair` can't."""
    with socket.create_server(("127.0.0.1", 0), backlog=count) as server:
        made = []
        for _ in range(count):
            near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
            far.setblocking(False)
            made.append((near, far))
    return made


def is_over(far: socket.socket) -> bool:
    """Whether the other end is closed."""
    try:
        return far.recv(1) == b""
    except ConnectionResetError:  # it had not read everything
        return True
    except BlockingIOError:
        return False


def hold_and_kill(agent: str, near: list[socket.socket]) -> None:
    """Start a process that holds connections, close them in this process, and kill the other one."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            FdHolder(agent).hold([each.fileno() for each in near])
            os.write(write, b"x")
            signal.pause()
        finally:
            os._exit(1)  # the parent runs the tests
    os.close(write)
    assert os.read(read, 1) == b"x"
    os.close(read)
    for each in near:
        each.close()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("count", [1, 300])
def test_connections_of_a_dead_process_stay_open_for_a_while(
    agent: str, keeper: FdKeeper, turn: Turn, clock: SimpleNamespace, count: int
) -> None:
    before = open_descriptors()
    made = pairs(count)
    hold_and_kill(agent, [near for near, _ in made])
    for _, far in made:
        assert far.send(b"to the dead") == 11
    turn(lambda: keeper.is_waiting)  # the keeper has noticed the death
    clock.now += HOLD_S * 0.9
    keeper.do_what_is_due(clock.now)
    for _, far in made:
        assert not is_over(far)
        assert far.send(b"to the dead") == 11
    clock.now += HOLD_S * 0.2
    turn(lambda: len(open_descriptors() - before) == count)  # the far ends
    for _, far in made:
        turn(partial(is_over, far))
        far.close()


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_connection_that_its_process_closes_is_closed(holder: FdHolder, turn: Turn, is_asked: bool, bar: Bar) -> None:
    """Connections are closed one by one, while the others are held."""
    before = open_descriptors()
    made = pairs(3)
    holder.hold([near.fileno() for near, _ in made])
    turn(lambda: len(open_descriptors() - before) == 9 + 2)  # both ends, a copy, and the connection to the agent
    for i, (near, far) in enumerate(made):
        begin = time.monotonic()
        near.close()
        if is_asked:
            holder.let_go()
        turn(partial(is_over, far))
        bar.check(time.monotonic() - begin, LOOK_EVERY_S + HOLD_S / 2, "closing")
        assert not any(is_over(other) for _, other in made[i + 1 :])
        far.close()
    assert holder._agent is not None
    holder._agent.close()
    turn(lambda: not open_descriptors() - before)


def test_a_connection_that_is_closed_during_the_handover_does_not_affect_others(
    holder: FdHolder, keeper: FdKeeper, turn: Turn
) -> None:
    (first, far), (second, other) = pairs(2)
    number = first.fileno()

    def closing() -> Iterator[int]:
        yield number
        first.close()  # as a thread of gloo may
        os.dup2(second.fileno(), number)  # reuses the number, so that the keeper, in this process, can't get it
        yield second.fileno()

    holder.hold(closing())
    turn(lambda: any(keeper._held.values()))
    turn(partial(is_over, far))
    assert not is_over(other)
    # The keeper closes the far end shortly before the holder records that.
    turn(lambda: [fd for fd, _ in holder._held.copy().values()] == [second.fileno()])
    os.close(number)
    second.close()
    turn(partial(is_over, other))
    for each in (far, other):
        each.close()


def test_a_descriptor_whose_number_was_reused_is_closed(holder: FdHolder, turn: Turn) -> None:
    ((near, far),) = pairs(1)
    holder.hold([near.fileno()])
    with socket.socket() as other:
        os.dup2(other.fileno(), near.fileno())
        turn(partial(is_over, far))
    near.close()
    far.close()


def test_a_connection_that_a_fork_closes_stays_open(
    holder: FdHolder, keeper: FdKeeper, selector: selectors.BaseSelector, turn: Turn
) -> None:
    ((near, far),) = pairs(1)
    holder.hold([near.fileno()])
    turn(lambda: any(keeper._held.values()))
    pid = os.fork()
    if pid == 0:
        try:
            near.close()
            holder.let_go()
            holder.hold([far.fileno()])
        finally:
            os._exit(0)  # the parent runs the tests
    os.waitpid(pid, 0)
    while ready := selector.select(0):  # handle everything that the fork may have sent
        for key, _ in ready:
            key.data()
    (held,) = keeper._held.values()
    assert list(held) == [0]
    near.close()
    turn(partial(is_over, far))
    far.close()


def test_a_connection_that_is_closed_already_does_not_affect_others(
    holder: FdHolder, keeper: FdKeeper, turn: Turn
) -> None:
    made = pairs(3)
    numbers = [near.fileno() for near, _ in made]
    made[1][0].close()
    holder.hold(numbers)
    turn(lambda: any(keeper._held.values()))
    (held,) = keeper._held.values()
    assert len(held) == 2
    for near, far in made:
        near.close()
        far.close()
    turn(lambda: not any(keeper._held.values()))


def test_refused_connections_are_held_when_descriptors_are_free_again(
    holder: FdHolder, keeper: FdKeeper, selector: selectors.BaseSelector, turn: Turn
) -> None:
    ((near, far),) = pairs(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(open_descriptors()) + 10, hard))  # less than half of it is free
    try:
        holder.hold([near.fileno()])
        turn(lambda: not selector.select(0))
        assert not keeper._held
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    holder.hold([near.fileno()])
    turn(lambda: any(keeper._held.values()))
    near.close()
    turn(partial(is_over, far))
    far.close()


def test_a_busy_agent_closes_connections_later(
    holder: FdHolder, keeper: FdKeeper, turn: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent reads nothing for a while."""
    monkeypatch.setattr("monarch_kernel.runtime.host.connection_holder._TIMEOUT_S", 0.01)
    held = pairs(1)[0]
    holder.hold([held[0].fileno()])
    with suppress(TimeoutError):
        while holder._agent is not None:
            holder._agent.send(b"L" + bytes(8 * 200))
    held[0].close()
    holder.let_go()
    turn(partial(is_over, held[1]))
    held[1].close()


def test_let_go_in_a_signal_handler_does_not_deadlock(holder: FdHolder) -> None:
    with holder._lock:
        holder.let_go()


def test_an_interrupt_leaves_the_lock_free(holder: FdHolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupts come at any bytecode of `let_go`, 3,000 of them."""
    near, far = pairs(1)[0]
    holder.hold([near.fileno()])
    count = 0
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        while count < 3_000:
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 1e-4))
                while True:
                    holder.let_go()
            except KeyboardInterrupt:
                count += 1
            assert is_free(holder._lock)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    near.close()
    far.close()


def is_free(lock: threading.RLock) -> bool:
    """Whether another thread can take the lock."""
    found: list[bool] = []

    def take() -> None:
        found.append(lock.acquire(timeout=LONG_S))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]


def test_half_of_the_descriptors_are_reserved(holder: FdHolder, keeper: FdKeeper, turn: Turn) -> None:
    made = pairs(40)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    half = len(open_descriptors()) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * half, hard))
    try:
        holder.hold([near.fileno() for near, _ in made])
        turn(lambda: any(keeper._held.values()))
        (held,) = keeper._held.values()
        assert len(held) < 40
        assert half <= free_descriptors() < half + 5  # other threads may close some meanwhile
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for near, far in made:
        near.close()
        far.close()
    turn(lambda: not any(keeper._held.values()))


def test_the_keeper_pauses_without_descriptors(
    agent: str, keeper: FdKeeper, selector: selectors.BaseSelector, turn: Turn, clock: SimpleNamespace
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(f"{agent}.fds")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            ((key, _),) = selector.select(0)
            key.data()
            assert not selector.select(0)
            assert keeper.is_waiting
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        keeper.do_what_is_due(clock.now)
        assert keeper.is_waiting
        clock.now += LONG_S
        turn(lambda: not keeper.is_waiting)
        turn(lambda: len(keeper._held) == 1)


def test_unknown_packets_are_ignored(agent: str, keeper: FdKeeper, turn: Turn) -> None:
    before = open_descriptors()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"{agent}.fds")
        for packet in (b"H", b"Hello", b"L", b"L" + bytes(8), b"?" * 9):
            socket.send_fds(stranger, [packet], [stranger.fileno()])
    turn(lambda: not keeper._held and not open_descriptors() - before)


def test_the_holder_does_nothing_without_an_agent(tmp_path: Path) -> None:
    ((near, far),) = pairs(1)
    holder = FdHolder(str(tmp_path / "nobody"))
    holder.hold([near.fileno()])
    near.close()
    assert is_over(far)
    holder.let_go()
    far.close()


def test_only_its_user_can_access_the_socket(agent: str, keeper: FdKeeper) -> None:
    assert Path(f"{agent}.fds").stat().st_mode & 0o777 == 0o600
