"""Connections that are held for a process: open while it lives and a moment longer, closed when it lets go of them."""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from monarch_kernel.agent.holding import HOLD_S, Hold, Keeper
from tests.waiting import LONG_S

Turn = Callable[[Callable[[], object]], None]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def agent(tmp_path: Path) -> str:
    return str(tmp_path / "H0")


@pytest.fixture
def keeper(agent: str) -> Iterator[Keeper]:
    with selectors.DefaultSelector() as selector:
        yield Keeper(agent, selector)
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]


@pytest.fixture
def turn(keeper: Keeper) -> Turn:
    """Has the keeper work until something is so."""

    def turn(condition: Callable[[], object]) -> None:
        last = time.monotonic() + LONG_S
        while not condition():
            assert time.monotonic() < last
            for key, _ in keeper._selector.select(0.01):
                key.data()
            keeper.close_due(time.monotonic())

    return turn


def pairs(count: int) -> list[tuple[socket.socket, socket.socket]]:
    """TCP connections, as `socket.socketpair` has none."""
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
    except ConnectionResetError:  # it had not read all
        return True
    except BlockingIOError:
        return False


def killed_holder(agent: str, near: list[socket.socket]) -> int:
    """Have a process hold connections, of which this one keeps none, and kill it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        Hold(agent, [each.fileno() for each in near])
        os.write(write, b"x")
        signal.pause()
        os._exit(1)
    os.read(read, 1)
    for fd in (read, write):
        os.close(fd)
    for each in near:
        each.close()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return pid


@pytest.mark.parametrize("count", [1, 600])
def test_what_a_process_held_stays_open_for_a_while_when_it_dies(agent: str, turn: Turn, count: int) -> None:
    before = descriptors()
    made = pairs(count)
    killed_holder(agent, [near for near, _ in made])
    died = time.monotonic()
    for _, far in made:
        assert far.send(b"to the dead") == 11
    turn(lambda: time.monotonic() > died + HOLD_S / 2)
    for _, far in made:
        assert not is_over(far)
        assert far.send(b"to the dead") == 11
    turn(lambda: descriptors() == before + count)  # the far ends
    assert time.monotonic() > died + HOLD_S * 0.9
    for _, far in made:
        turn(partial(is_over, far))
        far.close()


def test_what_is_let_go_of_is_closed_at_once(agent: str, turn: Turn) -> None:
    ((near, far),) = pairs(1)
    hold = Hold(agent, [near.fileno()])
    near.close()
    end = time.monotonic() + 0.2
    turn(lambda: time.monotonic() > end)
    assert not is_over(far)
    begun = time.monotonic()
    hold.release()
    turn(lambda: is_over(far))
    assert time.monotonic() - begun < HOLD_S / 2
    far.close()


def test_what_there_is_no_room_for_is_not_held(agent: str, turn: Turn) -> None:
    made = pairs(40)
    before = descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 80, hard))
    try:
        hold = Hold(agent, [near.fileno() for near, _ in made])
        end = time.monotonic() + 0.3
        turn(lambda: time.monotonic() > end)
        assert before < descriptors() < before + 30
        hold.release()
        turn(lambda: descriptors() == before)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for near, far in made:
        near.close()
        far.close()


def test_without_an_agent_nothing_is_held_and_nothing_fails(tmp_path: Path) -> None:
    ((near, far),) = pairs(1)
    hold = Hold(str(tmp_path / "nobody"), [near.fileno()])
    near.close()
    assert is_over(far)
    hold.release()
    far.close()


def test_the_socket_is_for_its_user_alone(agent: str, keeper: Keeper) -> None:
    assert Path(f"{agent}.fds").stat().st_mode & 0o777 == 0o600
