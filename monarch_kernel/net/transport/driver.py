"""Drives a socket from whichever thread waits for a message: one class for the controller and for ranks.

Theory of operation
===================

Only one thread at a time may use a transport: the one that holds the *I/O lock*. A thread that waits for something (a future,
its next message) takes the lock and becomes the *leader*: it sends what others submitted, receives, dispatches messages,
and sleeps in the transport until the next one. So a call and its answer need no switch between threads, which saves
some 70 us of 150. Other threads that wait at the same time are *followers*: each sleeps on its own lock until it is ready or
is offered the I/O lock.

A message for another thread than the leader (another executor of a rank) makes the leader *yield leadership*: it releases the
I/O lock and sleeps until something comes for it. The thread that was served will wait here next, and leads then. So a thread
that is called repeatedly soon receives its own messages.

While no foreground thread waits (the main thread runs a cell) the *background* thread has to serve the socket. It must not
compete for the lock with a thread that makes one call after the other, nor wake up for each call: it sleeps on a timer
(`Alarm`). A thread that releases the I/O lock without offering it to a follower sets the timer to `TICK_S`, unless it is set; a
foreground thread that leads stops it. When the timer expires:

- If there was no foreground activity since it was set, the background thread leads. A foreground thread that wants the lock
  sets a flag and wakes the transport, and the background thread releases the lock at once.
- If there was some, of a thread that submits and does not wait, the background thread serves the socket once, and sets the
  timer again, to twice the time, up to `MAX_TICK_S`. Such a thread rarely needs the background thread, which costs it the GIL.
- If the lock is held, the background thread does nothing. The holder sets the timer when it releases the lock.

The last case needs some care. A thread sets the timer after it has released the lock, and the background thread reads the
activity before it tries to take the lock, so one of the two sees the other. The timer and the flag that says whether it is set
change together, under a lock.

Invariants: callbacks and the transport are entered only with the I/O lock held. A thread that releases the lock checks whether
a follower wants it, and otherwise whether the timer is set; so does a follower that leaves, since it may have been offered the
lock at that moment. A submitted item is handled within about one tick, or at once if a leader sleeps in the transport.

A KeyboardInterrupt may arrive in the main thread between any two bytecodes. It is raised only at points where the state is
consistent, that is around the sleep of a leader in the transport and of others on their lock, and one at a time; elsewhere it
is recorded, and raised later. The shield goes up before the I/O lock is taken, and down after it is released.

An exception of a callback leaves through the wait of the foreground thread that leads. The background thread goes on after it,
and hands it to `threading.excepthook`, once for each line that raises: no other thread serves requests without a wait.

A process that the user's code forks has a copy of this object with only one of its threads, and shares the socket. Whatever it
submits or waits for is refused, before any lock is tried.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.signal() makes enums of all it takes and gives: 10 us
import operator
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

from monarch_kernel.errors import ForkedError
from monarch_kernel.net.transport.base import Peer, Transport
from monarch_kernel.net.transport.forks import in_forks
from monarch_kernel.net.transport.thread_interrupts import (
    ACTOR_THREAD,
    USER_THREAD,
    ActorThread,
    ThreadShield,
    UserThread,
)
from monarch_kernel.net.transport.timerfd import Alarm
from monarch_kernel.net.wire.codec import Frame, Packed, join

__all__ = ["Driver", "Waiter", "behind_shields"]

TICK_S = 0.004
MAX_TICK_S = 0.032
IDLE_TICK_S = 1.0
_FLUSH_S = 0.001
_SIGINT = 2
_IGNORE = 1
_RECEIVE_BATCH = 256
_forks = 0  # number of forks that led to this process: differs from its parents', needs no system call

T = TypeVar("T")


def _note_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_note_fork)


class Waiter:
    """What a thread waits for. A callback of the driver sets it ready, or any thread that submits something afterwards."""

    __slots__ = ("_lock", "ready")
    leads = True
    """Whether the thread drives the transport while it waits."""

    def __init__(self) -> None:
        self.ready = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Mark the wait as over."""
        self.ready = True
        self.nudge()

    def nudge(self) -> None:
        """Wake the waiting thread so that it checks its state."""
        try:
            self._lock.release()
        except RuntimeError:
            pass  # already nudged

    def sleep(self, timeout_s: float) -> None:
        """Wait for a nudge, at most ``timeout_s`` seconds; if negative, without a limit."""
        self._lock.acquire(timeout=timeout_s)


class _Shield:
    """Defers KeyboardInterrupt in the main thread, except while it is ``open``."""

    __slots__ = ("_old", "_pending", "open")

    def __init__(self) -> None:
        self.open = False
        self._pending = False
        self._old: Any = None

    def __enter__(self) -> _Shield:
        self._pending = False
        self._old = _signal.signal(_SIGINT, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _signal.signal(_SIGINT, self._old)
        if self._pending and not isinstance(error, KeyboardInterrupt):  # it takes precedence over another error
            self._pass_on(None)

    @in_forks(lambda shield: shield._old)
    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.open:
            self.open = False  # the exception leaves through code that a second one must not interrupt
            self._pass_on(frame)
            self.open = True
        else:
            self._pending = True

    def _pass_on(self, frame: FrameType | None) -> None:
        if callable(self._old):
            self._old(_SIGINT, frame)
        elif self._old != _IGNORE:
            raise KeyboardInterrupt

    def expose(self) -> None:
        """Let interrupts through, including a deferred one; call this in a ``try`` whose ``finally`` closes the shield."""
        self.open = True
        if self._pending:
            self._pending = self.open = False
            self._pass_on(None)
            self.open = True


def behind_shields(handler: Any) -> Any:
    """Return the SIGINT handler below all shields: the one that a wait in the main thread calls in the end."""
    while isinstance(shield := getattr(handler, "__self__", None), _Shield):
        handler = shield._old
    return handler


class _NoShield(_Shield):
    """A shield for other threads, in which Python runs no signal handlers."""

    __slots__ = ()

    def __enter__(self) -> _Shield:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _until(deadline: float | None) -> float:
    return -1 if deadline is None else max(0.0, deadline - time.monotonic())


class Driver(Generic[T]):
    """Drives one transport from whichever thread waits.

    Args:
            transport: the transport.
            on_message: called with what the transport receives: sender, or senders, and parts.
            on_item: called for each submitted item, in order.
            on_tick: called about every ``tick_s`` seconds while a thread leads; for timers.
            is_idle: whether nothing is due soon: then the background thread ticks only every `IDLE_TICK_S` until something
                happens.
            name: name of the background thread.
    """

    def __init__(
        self,
        transport: Transport,
        on_message: Callable[[Any, list[Frame]], None],
        on_item: Callable[[T], None],
        *,
        on_tick: Callable[[float], None] | None = None,
        tick_s: float = 0.2,
        is_idle: Callable[[], bool] = lambda: False,
        name: str = "monarch-io",
    ) -> None:
        self._transport = transport
        self._on_message = on_message
        self._on_item = on_item
        self._on_tick = on_tick
        self._tick_s = tick_s
        self._is_idle = is_idle
        self._next_tick = 0.0
        self._is_quiet = False  # whether nothing was handled since the last tick
        self._io_lock = threading.Lock()
        self._items: deque[T] = deque()
        self._outbox: dict[Peer, list[Packed]] = {}
        self._followers: deque[Waiter] = deque()
        self._yielded: set[Waiter] = set()
        self._leader: Waiter | None = None
        self._must_yield = False
        self._polling = False
        self._wanted = False
        self._activity = 0
        self._last_flush = 0.0
        self._closed = False
        self._over = False
        self._background_leads = False
        self._background = threading.Thread(target=self._serve, name=name, daemon=True)
        self._reported: set[tuple[type, str, int]] = set()  # errors of callbacks: type, file and line
        self._alarm = Alarm()
        self._alarm_lock = threading.RLock()  # the garbage collector may run here and submit something
        self._is_alarm_set = False
        self._seen = 0  # the activity when the timer was set
        self._main = threading.main_thread().ident
        self._pid = os.getpid()
        self._forks = _forks

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy in a fork of the process that owns the transport."""
        return self._forks != _forks

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called: waits end at once."""
        return self._closed

    def start(self) -> None:
        """Start the background thread."""
        self._background.start()
        self._set_alarm(TICK_S)

    # -- for any thread

    def submit(self, item: T) -> None:
        """Submit an item for the leader to handle; items of one thread stay in order.

        Raises:
            ForkedError: in a fork of the process.
        """
        if self._forks != _forks:
            raise ForkedError(self._pid)
        self._items.append(item)
        if self._polling:
            self._transport.wake()
        elif not (
            self._background_leads or self._io_lock.locked() or time.perf_counter() - self._last_flush < _FLUSH_S
        ):
            # A single item is sent at once; of a quick succession the rest goes out as one batch, at the next wait or tick.
            with self._shield():
                if self._io_lock.acquire(blocking=False):
                    try:
                        self._activity += 1
                        self._flush()
                    finally:
                        self._release()

    def wait(self, waiter: Waiter, timeout_s: float | None = None, *, patient: bool = False) -> bool:
        """Wait until ``waiter`` is ready, driving the transport meanwhile; returns False after ``timeout_s``.

        With ``patient``, only sleep while another foreground thread leads, and do not ask for the I/O lock.

        Raises:
            ForkedError: in a fork of the process, unless ``waiter`` is ready.
        """
        if waiter.ready:
            return True
        if self._forks != _forks:
            raise ForkedError(self._pid)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        yields = False
        with self._shield(waiter) as shield:
            while not waiter.ready and not self._closed:
                if deadline is not None and time.monotonic() >= deadline:
                    return False
                if yields or (patient and self._leader is not None):
                    self._wait_yielded(waiter, deadline, shield)
                elif self._io_lock.acquire(blocking=False):
                    try:
                        yields = self._lead(waiter, deadline, shield)
                    finally:
                        self._leader = None
                        self._release()
                else:
                    self._follow(waiter, deadline, shield)
        return waiter.ready

    def close(self) -> None:
        """Handle submitted items, stop the background thread, and close the transport; waits end with False."""
        with self._shield():
            if self._closed:
                return
            self._closed = True
            self._wanted = True
            self._transport.wake()
            with self._alarm_lock:
                self._alarm.set(0)
            if self._background.is_alive() and self._background is not threading.current_thread():
                self._background.join()
            with self._io_lock:
                while self._items or self._outbox:
                    self._flush()
                self._over = True
                self._transport.close()
            with self._alarm_lock:
                self._is_alarm_set = True  # stays True: a closed transport needs no timer
                self._alarm.close()
            for sleeper in [*self._followers, *self._yielded]:
                sleeper.nudge()

    # -- for callbacks, with the I/O lock held

    def serve(self, waiter: Waiter) -> None:
        """Set a thread's waiter ready, and leave leadership to that thread, which will soon wait here again."""
        waiter.set()
        if waiter is not self._leader and waiter.leads:
            self._must_yield = True

    def catch_up(self) -> None:
        """Handle the items submitted so far, before the message that is being handled."""
        items = self._items
        while items:
            self._on_item(items.popleft())

    def send(self, peer: Peer, packed: Packed) -> None:
        """Queue a message; all messages that one step queues for a peer go out as one multipart message."""
        queue = self._outbox.get(peer)
        if queue is None:
            self._outbox[peer] = [packed]
        else:
            queue.append(packed)

    # -- leading

    def _shield(self, waiter: Waiter | None = None) -> _Shield | ThreadShield:
        me = threading.get_ident()
        if me == self._main:
            return _Shield()
        thread: UserThread | ActorThread | None = USER_THREAD.get()
        if thread is None and (of_actor := ACTOR_THREAD.get()) is not None:
            thread = of_actor if of_actor.in_user_code and of_actor.ident == me else None
        return _NO_SHIELD if thread is None else ThreadShield(thread, lambda: self._wake(waiter))

    def _wake(self, waiter: Waiter | None) -> None:
        """Wake a waiting thread so that it checks its state; a running thread checks soon anyway."""
        if waiter is not None:
            waiter.nudge()
        if self._polling:
            self._transport.wake()

    def _lead(self, waiter: Waiter, deadline: float | None, shield: _Shield | ThreadShield) -> bool:
        """Lead until ``waiter`` is ready or the time is up; returns True if this thread must yield to another."""
        self._leader = waiter
        self._must_yield = False
        self._activity += 1
        if self._is_alarm_set:
            self._stop_alarm()
        self._flush()
        while not waiter.ready and not self._closed:
            timeout_s = None if deadline is None else deadline - time.monotonic()
            if timeout_s is not None and timeout_s <= 0:
                return False
            self._sleep(timeout_s, shield)
            self._receive(waiter)
            if self._items or self._outbox:
                self._flush()
            if self._must_yield and not waiter.ready:
                return True
        return False

    def _tick(self) -> float | None:
        """Call ``on_tick`` if it is due; returns the seconds until it is due next."""
        if self._on_tick is None:
            return None
        now = time.monotonic()
        if not (self._is_quiet and self._background_leads):
            self._next_tick = min(self._next_tick, now + self._tick_s)
        if now >= self._next_tick:
            is_slow = self._is_quiet and self._background_leads and self._is_idle()
            self._is_quiet = True
            self._next_tick = now + (IDLE_TICK_S if is_slow else self._tick_s)
            self._on_tick(now)
            self._flush()
        return self._next_tick - now

    def _sleep(self, timeout_s: float | None, shield: _Shield | ThreadShield) -> None:
        until_tick = self._tick()
        if until_tick is not None:
            timeout_s = until_tick if timeout_s is None else min(timeout_s, until_tick)
        self._polling = True
        try:
            if not self._items:  # checked after _polling was set: a submit between the two wakes the transport
                shield.expose()
                self._transport.wait(timeout_s)
        finally:
            shield.open = False
            self._polling = False

    def _receive(self, waiter: Waiter | None) -> None:
        for _ in range(_RECEIVE_BATCH):
            received = self._transport.recv()
            if received is None:
                return
            self._is_quiet = False
            self._on_message(*received)
            if waiter is not None and waiter.ready:
                return

    def _flush(self) -> None:
        """Handle the items submitted so far, and send; not those that others submit meanwhile, which might never end."""
        items = self._items
        if self._over:
            items.clear()
            return
        for _ in range(len(items)):
            if items:  # a callback may have called catch_up()
                self._is_quiet = False
                self._on_item(items.popleft())
        if self._outbox:
            outbox, self._outbox = self._outbox, {}
            last: list[Packed] = []
            parts: Sequence[Frame] = ()
            for peer, batch in outbox.items():
                if len(batch) != len(last) or any(map(operator.is_not, batch, last)):
                    parts = join(batch)  # what several peers get is joined once, and travels once to each host
                last = batch
                self._transport.send(peer, parts)
            self._transport.flush()
        self._last_flush = time.perf_counter()

    def _release(self, tick_s: float = TICK_S) -> None:
        self._io_lock.release()
        self._offer(tick_s)

    def _offer(self, tick_s: float = TICK_S) -> None:
        """Make sure that a thread serves the transport, after the I/O lock was released."""
        try:
            self._followers[0].nudge()
        except IndexError:  # there is no follower, or it left just now
            if not self._is_alarm_set:
                self._set_alarm(tick_s)

    def _wait_yielded(self, waiter: Waiter, deadline: float | None, shield: _Shield | ThreadShield) -> None:
        self._yielded.add(waiter)
        try:
            if not waiter.ready and not self._closed:
                shield.expose()
                waiter.sleep(_until(deadline))
        finally:
            shield.open = False
            self._yielded.discard(waiter)

    def _follow(self, waiter: Waiter, deadline: float | None, shield: _Shield | ThreadShield) -> None:
        stays = False
        self._followers.append(waiter)
        try:
            if self._background_leads:
                self._wanted = True
                self._transport.wake()
            if not waiter.ready and self._io_lock.locked() and not self._closed:
                shield.expose()
                waiter.sleep(_until(deadline))
            stays = not waiter.ready and (deadline is None or time.monotonic() < deadline)
        finally:
            shield.open = False
            self._followers.remove(waiter)
            if not stays and not self._io_lock.locked():
                self._offer()  # this thread may have been offered the lock, and does not want it

    # -- the background thread

    def _set_alarm(self, tick_s: float) -> None:
        with self._alarm_lock:
            if not self._is_alarm_set:
                self._seen = self._activity
                self._alarm.set(tick_s)
                self._is_alarm_set = True

    def _stop_alarm(self) -> None:
        with self._alarm_lock:
            if not self._over:
                self._alarm.stop()
                self._is_alarm_set = False

    def _serve(self) -> None:
        tick_s = TICK_S
        while not self._closed:
            self._alarm.sleep()
            with self._alarm_lock:
                self._is_alarm_set = False
                is_idle = self._activity == self._seen
            if not self._io_lock.acquire(blocking=False):
                continue
            try:
                if is_idle:
                    tick_s = TICK_S
                    self._lead_in_background()
                else:
                    tick_s = min(2 * tick_s, MAX_TICK_S)
                    self._receive(None)
                    self._flush()
                    self._tick()  # else there would be no ticks during a series of calls that no thread waits for
            except Exception as error:
                self._report(error)
            finally:
                self._background_leads = False
                self._release(tick_s)

    def _report(self, error: Exception) -> None:
        """Report the error of a callback in the background thread, unless the same line has raised one of its type before."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if (place := (type(error), frame.filename, frame.lineno or 0)) not in self._reported:
            self._reported.add(place)
            threading.excepthook(
                threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
            )

    def _lead_in_background(self) -> None:
        self._background_leads = True
        self._wanted = self._must_yield = False
        while not (self._wanted or self._followers or self._must_yield or self._closed):
            self._flush()
            self._sleep(None, _NO_SHIELD)
            self._receive(None)
            self._flush()


_NO_SHIELD = _NoShield()
