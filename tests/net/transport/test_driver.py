"""The waiting thread drives: each waiter gets its messages, no wait misses an event, interrupts break nothing."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from monarch_kernel.net.hosts.zmq import ZmqRank, ZmqRouter
from monarch_kernel.net.transport import driver as driver_module
from monarch_kernel.net.transport.base import CONTROLLER, Peer, Transport
from monarch_kernel.net.transport.driver import Driver, Waiter
from monarch_kernel.net.transport.loopback import MemoryHub, MemoryTransport
from monarch_kernel.net.transport.timerfd import Alarm
from monarch_kernel.net.wire.codec import Frame, join, pack, split
from monarch_kernel.net.wire.messages import Payload, Ping, Release, Result
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_until

ECHO = b"R1"

Item = Callable[[], None]


class Echo:
    """A peer on a separate thread that answers each ping with a result; with `hold` it keeps the answers."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.seen: list[int] = []
        self.batches = 0
        self._over = False
        self._thread = threading.Thread(target=self._serve, name="echo")
        self.transport.send(CONTROLLER, join([pack(Result(0, Payload()))]))
        self._thread.start()

    def _serve(self) -> None:
        while True:
            while (received := self.transport.recv()) is not None:
                ids = [message.id for message, _ in split(received[1])]  # type: ignore[attr-defined]
                self.batches += 1
                self.seen += ids
                self.transport.send(CONTROLLER, join([pack(Result(id, Payload())) for id in ids]))
            if self._over:  # checked after recv(), which consumes a wake()
                return
            self.transport.wait(LONG_S)

    def close(self) -> None:
        self._over = True
        self.transport.wake()
        self._thread.join()
        self.transport.close()


class Caller:
    """A driver, and the calls that wait for the echo."""

    def __init__(
        self,
        transport: Transport,
        tick: Callable[[float], None] | None = None,
        tick_s: float = 0.2,
        is_idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self.handled: list[int] = []
        self.answered: list[int] = []
        self.waiters: dict[int, Waiter] = {}
        self.met = threading.Event()
        self.inside = threading.Lock()
        self.driver: Driver[int] = Driver(
            transport, self._on_message, self._on_item, on_tick=tick, tick_s=tick_s, is_idle=is_idle
        )
        self.driver.start()
        assert self.met.wait(LONG_S)  # a message for a peer that has not connected is dropped

    def _on_item(self, id: int) -> None:
        assert self.inside.acquire(blocking=False), "two threads drive at once"
        self.handled.append(id)
        self.driver.send(ECHO, pack(Ping(id)))
        self.inside.release()

    def _on_message(self, peer: Peer, parts: list[Frame]) -> None:
        assert self.inside.acquire(blocking=False), "two threads drive at once"
        for message, _ in split(parts):
            id = message.id  # type: ignore[attr-defined]
            if not id:
                self.met.set()
                continue
            self.answered.append(id)
            waiter = self.waiters.get(id)
            if waiter is not None:
                waiter.set()
        self.inside.release()

    def submit(self, id: int) -> Waiter:
        waiter = self.waiters[id] = Waiter()
        self.driver.submit(id)
        return waiter

    def call(self, id: int, timeout_s: float | None = LONG_S) -> bool:
        return self.driver.wait(self.submit(id), timeout_s)


def make_memory(folder: Path) -> tuple[Transport, Transport]:
    hub = MemoryHub()
    return hub.connect(), hub.connect(ECHO)


def make_zmq(folder: Path) -> tuple[Transport, Transport]:
    address = f"ipc://{folder}/c"
    return ZmqRouter(address), ZmqRank(address, ECHO, f"ipc://{folder}/R1", has_line=True)


@pytest.fixture(params=[make_memory, make_zmq], ids=["memory", "zmq"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Transport, Transport]:
    made: tuple[Transport, Transport] = request.param(tmp_path)
    return made


@pytest.fixture
def echo(ends: tuple[Transport, Transport]) -> Iterator[Echo]:
    echo = Echo(ends[1])
    yield echo
    echo.close()


@pytest.fixture
def caller(ends: tuple[Transport, Transport], echo: Echo) -> Iterator[Caller]:
    caller = Caller(ends[0])
    yield caller
    caller.driver.close()


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition that another thread fulfils."""
    wait_until(condition, "another thread")


def run_all(*targets: Callable[[], object]) -> None:
    """Run functions on separate threads, and raise their exceptions."""
    errors: list[BaseException] = []

    def run(target: Callable[[], object]) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[target]) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def background_leads(caller: Caller) -> bool:
    return caller.driver._background_leads


# -- one at a time


def test_round_trips(caller: Caller) -> None:
    for id in range(1, 300):
        assert caller.call(id)
    assert caller.handled == caller.answered == list(range(1, 300))


def test_submitted_items_are_sent_without_a_wait(caller: Caller, echo: Echo) -> None:
    for id in range(1, 20):
        caller.submit(id)
        until(lambda id=id: id in echo.seen)  # type: ignore[misc]
        until(lambda id=id: id in caller.answered)  # type: ignore[misc]


@pytest.mark.parametrize("idle", [False, True], ids=["just after a wait", "when no thread has waited for long"])
def test_the_background_thread_serves_messages_without_a_waiter(caller: Caller, idle: bool, bar: Bar) -> None:
    for id in range(1, 100, 2):
        assert caller.call(id)
        if idle:
            until(lambda: background_leads(caller))
        with bar.below(2.0, "an answer through the background thread"):  # a tick is 4 ms
            waiter = caller.submit(id + 1)
            until(lambda waiter=waiter: waiter.ready)  # type: ignore[misc]


class ManualAlarm(Alarm):
    """An alarm that, once ``is_manual``, expires when the test says so, and when the driver closes."""

    __slots__ = ("is_manual", "log")

    def __init__(self) -> None:
        super().__init__()
        self.is_manual = False
        self.log: list[str] = []

    def set(self, delay_s: float) -> None:
        if not self.is_manual or not delay_s:
            super().set(delay_s)
        self.log.append("set")

    def stop(self) -> None:
        self.log.append("stop")
        super().stop()

    def go_off(self) -> None:
        super().set(0)


@pytest.fixture
def manual(
    ends: tuple[Transport, Transport], echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Caller, ManualAlarm, list[str]]]:
    """A driver whose background thread sleeps until the test wakes it, its alarm, and the threads that have ticked."""
    monkeypatch.setattr(driver_module, "Alarm", ManualAlarm)
    ticks: list[str] = []
    caller = Caller(ends[0], lambda now: ticks.append(threading.current_thread().name), tick_s=0.0)
    alarm = caller.driver._alarm
    assert isinstance(alarm, ManualAlarm)
    try:
        until(lambda: background_leads(caller))  # while the background thread leads, the alarm is not set
        alarm.is_manual = True
        assert caller.call(1)
        alarm.log.clear()
        yield caller, alarm, ticks
    finally:
        caller.driver.close()


def test_a_burst_travels_in_one_message(
    manual: tuple[Caller, ManualAlarm, list[str]], echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, _, _ = manual
    monkeypatch.setattr(driver_module, "_FLUSH_S", LONG_S)  # items within this time are one burst
    count = 2000
    for id in range(2, count):
        caller.submit(id)
    assert caller.call(count)
    assert echo.seen == list(range(1, count + 1))
    assert echo.batches == 2


def test_the_foreground_takes_over_from_the_background_thread(caller: Caller, bar: Bar) -> None:
    for id in range(1, 50):
        until(lambda: background_leads(caller))
        with bar.below(5.0, "a call"):
            assert caller.call(id)


def test_a_wait_that_submits_nothing_takes_over_too(caller: Caller) -> None:
    """No submit wakes the background thread from its sleep in the transport."""
    until(lambda: background_leads(caller))
    waiter = Waiter()

    def act() -> None:
        until(lambda: caller.driver._leader is waiter)
        waiter.set()
        caller.driver.submit(1)

    run_all(lambda: caller.driver.wait(waiter, LONG_S), act)


def test_a_wait_for_a_ready_waiter_returns_at_once(caller: Caller) -> None:
    waiter = Waiter()
    waiter.set()
    assert caller.driver.wait(waiter, 0)
    assert caller.driver.wait(waiter)


@pytest.mark.parametrize("idle", [False, True], ids=["leads", "follows the background"])
def test_timeouts_end_the_wait_and_nothing_else(caller: Caller, idle: bool, bar: Bar) -> None:
    if idle:
        until(lambda: background_leads(caller))
    start = time.monotonic()
    with bar.below(5.0, "a wait of 50 ms"):
        assert caller.driver.wait(Waiter(), 0.05) is False
    bar.check_above(time.monotonic() - start, 0.045, "a wait of 50 ms")
    assert caller.driver.wait(Waiter(), 0) is False
    assert caller.call(1)


def test_a_thread_that_sets_a_waiter_and_submits_ends_the_wait(caller: Caller) -> None:
    waiter = Waiter()

    def act() -> None:
        until(lambda: caller.driver._io_lock.locked())
        waiter.set()
        caller.driver.submit(1)

    run_all(lambda: caller.driver.wait(waiter, LONG_S), act)
    assert waiter.ready


def test_ticks_come_from_any_leader(ends: tuple[Transport, Transport], echo: Echo) -> None:
    ticks: list[str] = []
    caller = Caller(ends[0], lambda now: ticks.append(threading.current_thread().name), tick_s=0.01)
    try:
        until(lambda: len(ticks) > 3)
        assert set(ticks) == {"monarch-io"}
        me = threading.current_thread().name
        until(lambda: caller.driver.wait(Waiter(), 0.02) or me in ticks)
    finally:
        caller.driver.close()


def test_ticks_are_rare_while_nothing_happens_and_nothing_is_due(
    ends: tuple[Transport, Transport], echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "IDLE_TICK_S", 10_000.0)
    ticks: list[float] = []
    is_idle = threading.Event()
    caller = Caller(ends[0], ticks.append, tick_s=0.001, is_idle=is_idle.is_set)
    is_rare = lambda: caller.driver._next_tick > time.monotonic() + 5_000  # noqa: E731
    try:
        until(lambda: len(ticks) > 9)  # something is due: also after a tick in which nothing has happened
        assert not is_rare()
        is_idle.set()
        until(is_rare)
        for id in (1, 2):
            before = len(ticks)
            caller.submit(id)
            until(lambda before=before: len(ticks) > before)  # type: ignore[misc]
            until(is_rare)
        before = len(ticks)
        until(lambda: caller.driver.wait(Waiter(), 0.005) or len(ticks) > before)  # also for a thread that waits
    finally:
        caller.driver.close()


def test_ticks_come_while_only_submits_keep_the_driver_busy(
    manual: tuple[Caller, ManualAlarm, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background thread does not lead: a program that calls broadcast() again and again serves the transport itself."""
    caller, alarm, ticks = manual
    monkeypatch.setattr(driver_module, "_FLUSH_S", 0.0)  # no submit is left to the background thread
    ticks.clear()
    for id in range(2, 7):
        caller.driver.submit(id)
        n_ticks, n_events = len(ticks), len(alarm.log)
        alarm.go_off()
        until(lambda n_ticks=n_ticks: len(ticks) > n_ticks)  # type: ignore[misc]
        assert not background_leads(caller)
        until(lambda n_events=n_events: len(alarm.log) > n_events)  # type: ignore[misc]
    assert set(ticks) == {"monarch-io"}


# -- many at a time


def test_each_of_several_waiters_gets_its_message(caller: Caller) -> None:
    barrier = threading.Barrier(6)

    def work(thread: int) -> None:
        for i in range(100):
            barrier.wait(LONG_S)
            id = 1 + thread + 6 * i
            assert caller.call(id)
            assert id in caller.answered

    run_all(*[lambda thread=thread: work(thread) for thread in range(6)])  # type: ignore[misc]
    assert sorted(caller.answered) == list(range(1, 601))


def test_thousands_of_round_trips_from_many_threads(caller: Caller) -> None:
    threads, count = 5, 600

    def work(thread: int) -> None:
        for i in range(count):
            assert caller.call(1 + thread + threads * i), "a wake-up was lost"

    run_all(*[lambda thread=thread: work(thread) for thread in range(threads)])  # type: ignore[misc]
    assert sorted(caller.answered) == list(range(1, threads * count + 1))
    for thread in range(threads):
        mine = [id for id in caller.handled if (id - 1) % threads == thread]
        assert mine == sorted(mine)


def test_no_wake_up_is_lost_when_waits_time_out(caller: Caller) -> None:
    """Waits of all lengths, many of which end just when it is their turn to lead; one patient waiter needs another leader."""
    over = threading.Event()
    ids = iter(range(1, 10**9))
    lock = threading.Lock()

    def next_id() -> int:
        with lock:
            return next(ids)

    def impatient(seed: int) -> None:
        source = random.Random(seed)
        while not over.is_set():
            waiter = caller.submit(next_id())
            caller.driver.wait(waiter, source.choice([0, 1e-5, 5e-5, 1e-4, 2e-4, 1e-3]))

    def patient() -> None:
        try:
            for _ in range(400):
                assert caller.call(next_id()), "a wake-up was lost"
        finally:
            over.set()

    run_all(patient, patient, *[lambda seed=seed: impatient(seed) for seed in range(3)])  # type: ignore[misc]


def test_a_follower_that_gives_up_passes_its_offer_on(caller: Caller) -> None:
    """The waiter that was offered the lock has no time left: another thread must drive, or nothing is ever sent again."""
    until(lambda: background_leads(caller))
    caller.call(1)
    driver = caller.driver

    class Late(Waiter):
        """A waiter that is nudged, and then finds that its time is up."""

        __slots__ = ()

        def sleep(self, timeout_s: float) -> None:
            super().sleep(LONG_S)
            gone = time.monotonic() + 0.05
            while time.monotonic() < gone:
                pass

    leading = Waiter()
    late = Late()
    patient = Waiter()
    leader = threading.Thread(target=lambda: driver.wait(leading, LONG_S))
    leader.start()
    until(lambda: driver._leader is leading and driver._polling)
    follower = threading.Thread(target=lambda: driver.wait(late, 0.05))
    follower.start()
    until(lambda: len(driver._followers) == 1)
    last = threading.Thread(target=lambda: driver.wait(patient, LONG_S))
    last.start()
    until(lambda: len(driver._followers) == 2)
    leading.set()
    driver.submit(2)  # wakes the leader, which leaves and offers the lock to the late waiter
    leader.join()
    follower.join()
    until(driver._io_lock.locked)
    patient.set()
    driver.submit(3)
    last.join(LONG_S)
    assert not last.is_alive()


# -- the alarm of the background thread


class SlowAlarm(Alarm):
    """An alarm that expires before `set` returns, once ``io_lock`` is set, and another thread has taken the lock by then."""

    __slots__ = ("io_lock", "looked", "me")

    def __init__(self) -> None:
        super().__init__()
        self.io_lock: threading.Lock | None = None
        self.looked = threading.Event()
        self.me = threading.get_ident()

    def set(self, delay_s: float) -> None:
        if self.io_lock is None or threading.get_ident() != self.me:
            super().set(delay_s)
            return
        assert self.io_lock.acquire(timeout=LONG_S)
        self.io_lock = None
        self.looked.clear()
        super().set(delay_s)
        self.looked.wait(0.3)  # times out if the background thread can't check before set() returns

    def sleep(self) -> None:
        self.looked.set()
        super().sleep()


def test_an_alarm_that_goes_off_while_it_is_set_is_not_lost(
    ends: tuple[Transport, Transport], echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise all threads believe that it is set, and none serves the socket until the next wait."""
    monkeypatch.setattr(driver_module, "Alarm", SlowAlarm)
    caller = Caller(ends[0])
    driver = caller.driver
    alarm = driver._alarm
    assert isinstance(alarm, SlowAlarm)
    try:
        alarm.io_lock = driver._io_lock
        id = 1
        while caller.call(id) and alarm.io_lock is not None:  # until this thread has led
            id += 1
        caller.submit(id + 1)  # is left to the holder of the lock, which leaves it to the background thread
        driver._release()
        until(lambda: id + 1 in caller.answered)
    finally:
        alarm.io_lock = None
        caller.driver.close()


def test_successive_calls_stop_the_alarm(
    manual: tuple[Caller, ManualAlarm, list[str]],
) -> None:
    caller, alarm, _ = manual
    for id in range(2, 42):
        assert caller.call(id)
    assert alarm.log == ["stop", "set"] * 40


@pytest.mark.timing
def test_successive_waits_do_not_wake_the_background_thread(caller: Caller) -> None:
    """On a busy machine more than a tick may pass between two waits, and then the background thread has to check."""
    caller.call(1)
    before = thread_switches(caller.driver._background)
    for _ in range(40):
        caller.driver.wait(Waiter(), 0.02)
    assert thread_switches(caller.driver._background) - before < 20  # two for each wait, if each woke it


def thread_switches(thread: threading.Thread) -> int:
    """Count how often a thread has gone to sleep."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.partition("voluntary_ctxt_switches:")[2].split()[0])


# -- the end


@pytest.mark.parametrize("count", [1, 3])
def test_close_ends_the_waits(ends: tuple[Transport, Transport], echo: Echo, count: int) -> None:
    caller = Caller(ends[0])
    assert caller.call(1)
    results: list[bool] = []

    def close() -> None:
        until(lambda: caller.driver._io_lock.locked() and len(caller.driver._followers) >= count - 1)
        caller.driver.close()

    run_all(close, *[lambda: results.append(caller.driver.wait(Waiter(), None)) for _ in range(count)])
    assert results == [False] * count


def test_close_sends_submitted_items(ends: tuple[Transport, Transport], echo: Echo) -> None:
    caller = Caller(ends[0])
    assert caller.call(1)
    for id in range(2, 200):
        caller.submit(id)
    caller.driver.close()
    caller.driver.close()
    until(lambda: echo.seen == list(range(1, 200)))


def test_items_submitted_after_close_are_dropped(ends: tuple[Transport, Transport], echo: Echo) -> None:
    caller = Caller(ends[0])
    caller.call(1)
    caller.driver.close()
    time.sleep(0.001)  # a submit right after another is left to the background thread
    assert caller.call(2, 0.01) is False
    assert caller.driver.wait(Waiter(), None) is False
    assert caller.handled == [1]


def test_closing_while_others_submit_and_wait(tmp_path: Path) -> None:
    for i in range(20):
        folder = tmp_path / str(i)
        folder.mkdir()
        ours, theirs = make_memory(folder) if i else make_zmq(folder)
        echo = Echo(theirs)
        caller = Caller(ours)
        ids = itertools.count(1)  # next() is atomic
        started = threading.Event()

        def work(caller: Caller = caller, ids: Iterator[int] = ids, started: threading.Event = started) -> None:
            while True:
                id = next(ids)
                if id == 30:
                    started.set()
                if not caller.call(id):
                    return

        def close(caller: Caller = caller, started: threading.Event = started) -> None:
            started.wait(LONG_S)
            caller.driver.close()

        run_all(work, work, work, close)
        echo.close()


def test_an_error_in_a_callback_reaches_the_leader_and_breaks_nothing(ends: tuple[Transport, Transport]) -> None:
    def fail(peer: Peer, parts: list[Frame]) -> None:
        raise ZeroDivisionError

    items: list[int] = []
    driver: Driver[int] = Driver(ends[0], fail, items.append)
    try:
        ends[1].send(CONTROLLER, join([pack(Release(9))]))
        with pytest.raises(ZeroDivisionError):
            driver.wait(Waiter(), LONG_S)
        driver.start()
        driver.submit(1)
        until(lambda: items == [1])
    finally:
        driver.close()
        ends[1].close()


# -- interrupts

KILLER = """
import os, random, sys, time
pid, source = int(sys.argv[1]), random.Random(int(sys.argv[2]))
while os.getppid() == pid:
    until = time.perf_counter() + source.choice([2e-5, 1e-4, 3e-4]) * source.random()
    while time.perf_counter() < until:
        pass
    os.kill(pid, 2)
"""

INTERRUPTED = textwrap.dedent(
    """
    import os, signal, subprocess, sys, threading, time
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    import test_driver as t

    make, seed, rounds, enough = getattr(t, sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
    ours, theirs = make(Path(sys.argv[6]))
    echo, caller = t.Echo(theirs), t.Caller(ours)
    delivered = armed = 0  # armed: how many interrupts may be raised
    over = threading.Event()
    unanswered = []

    def on_interrupt(signum, frame):
        global armed, delivered
        if armed:
            armed -= 1
            delivered += 1
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_interrupt)

    def survives(action):  # returns its result; None if it was interrupted, once or twice
        global armed
        result = None
        try:
            try:
                armed = 2
                result = action()
                armed = 0
            except KeyboardInterrupt:
                armed = 0
        except KeyboardInterrupt:
            pass
        armed = 0
        return result

    def compete():  # so that the main thread leads, follows and hands over
        id = 10**6
        while not over.is_set():
            for id in range(id + 1, id + 20):
                if not caller.call(id):
                    unanswered.append(id)
                    return
            over.wait(0.005)

    competitor = threading.Thread(target=compete)
    competitor.start()
    killer = subprocess.Popen([sys.executable, "-c", t.KILLER, str(os.getpid()), seed])
    submitted, id, end = [], 0, time.monotonic() + t.LONG_S
    while (len(submitted) < rounds or delivered < enough) and time.monotonic() < end and not unanswered:
        id += 1
        waiter = caller.waiters[id] = t.Waiter()
        if survives(lambda: (caller.driver.submit(id), True)):
            submitted.append(id)
            until = time.monotonic() + t.LONG_S
            while not waiter.ready:
                survives(lambda: caller.driver.wait(waiter, t.LONG_S))
                if time.monotonic() > until:
                    unanswered.append(id)
                    break
    killer.kill()
    killer.wait()
    over.set()
    assert not unanswered, f"{unanswered} not answered, after {delivered} interrupts"
    competitor.join()
    handled = [id for id in caller.handled if id < 10**6]
    assert handled == sorted(set(handled)), "order was not kept, or something was handled twice"
    assert set(submitted) <= set(handled)
    t.until(lambda: len(caller.answered) >= len(caller.handled))
    assert [id for id in caller.answered if id < 10**6] == handled, "not answered exactly once, in order"
    assert not caller.driver._followers and not caller.driver._yielded
    assert signal.getsignal(signal.SIGINT) is on_interrupt
    caller.driver.close()
    echo.close()
    print(delivered, len(submitted))
    """
)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("make", ["make_memory", "make_zmq"])
def test_interrupts_at_any_moment_break_nothing(make: str, seed: int, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(Path(__file__).parent), make, str(seed), "200", "1000", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    delivered, submitted = map(int, run.stdout.split())
    assert delivered >= 100
    assert submitted >= 50


def test_messages_that_several_peers_get_in_one_step_are_joined_once() -> None:
    """The transport sends what is the same object once to each host."""
    sent: dict[Peer, object] = {}

    class Seen(MemoryTransport):
        def send(self, peer: Peer, parts: Sequence[Frame]) -> bool:
            sent[peer] = parts
            return True

    pings = [pack(Ping(id)) for id in range(3)]
    given = {b"R1": pings[:2], b"R2": pings[:2], b"R3": pings[:1], b"R4": pings[1:], b"R5": pings[1:]}

    def on_item(item: int) -> None:
        for at in range(2):
            for peer, messages in given.items():
                for message in messages[at : at + 1]:
                    driver.send(peer, message)

    driver: Driver[int] = Driver(Seen(MemoryHub(), CONTROLLER), lambda peer, parts: None, on_item)
    driver.submit(1)
    driver.catch_up()
    driver.close()
    assert {peer: [each for each, _ in split(parts)] for peer, parts in sent.items()} == {  # type: ignore[arg-type]
        peer: [Ping(pings.index(each)) for each in messages] for peer, messages in given.items()
    }
    assert sent[b"R1"] is sent[b"R2"]
    assert sent[b"R4"] is sent[b"R5"]


def test_a_second_interrupt_does_not_interrupt_the_cleanup_after_the_first() -> None:
    cleaned: list[int] = []

    class Struck(MemoryTransport):
        def wait(self, timeout_s: float | None) -> None:
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)
                cleaned.append(1)

    driver: Driver[int] = Driver(Struck(MemoryHub(), CONTROLLER), lambda peer, parts: None, lambda item: None)
    with pytest.raises(KeyboardInterrupt):
        driver.wait(Waiter(), LONG_S)
    assert cleaned == [1]
    assert not driver._io_lock.locked()
    driver.close()


def test_an_interrupt_of_a_leader_during_a_callback_is_not_lost(ends: tuple[Transport, Transport], echo: Echo) -> None:
    """It arrives while a callback runs: the callback completes, and then the wait is interrupted."""
    finished: list[int] = []

    def on_item(item: int) -> None:
        signal.raise_signal(signal.SIGINT)
        finished.append(item)

    driver: Driver[int] = Driver(ends[0], lambda peer, parts: None, on_item)
    try:
        driver._items.append(1)
        with pytest.raises(KeyboardInterrupt):
            driver.wait(Waiter(), LONG_S)
        assert finished == [1]
        time.sleep(0.001)
        with pytest.raises(KeyboardInterrupt):
            driver.submit(2)
        assert finished == [1, 2]
        assert not driver._io_lock.locked()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        driver.start()
        with suppress(KeyboardInterrupt):
            driver.close()


def test_an_interrupt_while_a_callback_fails_is_not_lost(ends: tuple[Transport, Transport]) -> None:
    def fail(peer: Peer, parts: list[Frame]) -> None:
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError

    driver: Driver[int] = Driver(ends[0], fail, lambda item: None)
    try:
        ends[1].send(CONTROLLER, join([pack(Release(9))]))
        with pytest.raises(KeyboardInterrupt) as caught:
            driver.wait(Waiter(), LONG_S)
        assert isinstance(caught.value.__context__, ZeroDivisionError)
        assert not driver._io_lock.locked()
    finally:
        driver.start()
        driver.close()
        ends[1].close()


def test_the_background_thread_goes_on_after_an_error_of_a_callback_and_reports_it_once(
    ends: tuple[Transport, Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[threading.ExceptHookArgs] = []
    handled: list[int] = []

    def on_item(item: int) -> None:
        handled.append(item)
        if item % 2:
            raise ValueError(f"item {item}")

    monkeypatch.setattr(threading, "excepthook", reported.append)
    driver: Driver[int] = Driver(ends[0], lambda peer, parts: None, on_item)
    driver.start()
    try:
        for item in range(1, 5):
            until(lambda: driver._background_leads)
            driver.submit(item)
            until(lambda item=item: item in handled)  # type: ignore[misc]
    finally:
        driver.close()
        ends[1].close()
    assert handled == [1, 2, 3, 4]
    assert [(str(each.exc_value), each.thread) for each in reported] == [("item 1", driver._background)]
