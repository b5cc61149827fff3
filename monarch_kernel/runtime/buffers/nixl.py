"""Access to RDMA hardware (InfiniBand, RoCE, EFA) by NIXL, an optional library, which uses UCX.

Both ends register the memory with an `Agent`; then the requesting end reads or writes, and the other end takes no part. There
are no keys: over TCP, any process that can connect could write to this one. UCX therefore may not use TCP, unless ``UCX_TLS``
says so. An agent has a thread that uses half a core, even when idle; it ends when the last user releases the agent.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from monarch_kernel.net.memory.layout import Memory

__all__ = ["Agent", "Described", "NixlUnreachable", "Registration", "agent", "has_hardware", "is_installed"]

_VARIANTS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
_DEVICES = "/sys/class/infiniband"  # devices of all drivers that support verbs, EFA included
_SPIN_S = 0.001
_PAUSE_S = 0.0001
_SETTINGS = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal", "UCX_TLS": "^tcp", "UCX_KEEPALIVE_INTERVAL": "2s"}


class NixlUnreachable(Exception):
    """NIXL can't be used, or does not reach the other process; the text has the message of NIXL."""


class Described(NamedTuple):
    """Description of registered memory for other processes; ``start`` is the address in its owner."""

    agent: str
    metadata: bytes
    kind: str
    device: int
    start: int
    nbytes: int
    is_readonly: bool

    def check(self, runs: Sequence[tuple[int, int]], *, is_write: bool) -> None:
        """Check that all runs, each (address, nbytes), lie within this memory.

        Raises:
            ValueError: a run lies outside.
            TypeError: the memory is read-only.
        """
        if is_write and self.is_readonly:
            raise TypeError("the memory can only be read")
        end = self.start + self.nbytes
        if not all(self.start <= address <= address + nbytes <= end for address, nbytes in runs):
            raise ValueError("the block lies beyond the end of what was lent")


def is_installed() -> bool:
    """Whether the library is installed, for any version of CUDA."""
    return any(importlib.util.find_spec(name) is not None for name in ("nixl", *_VARIANTS))


def has_hardware() -> bool:
    """Whether this machine has RDMA devices."""
    try:
        return bool(os.listdir(_DEVICES))
    except OSError:
        return False


_agents: weakref.WeakValueDictionary[int, Agent] = weakref.WeakValueDictionary()  # by pid: a fork needs its own
_lock = threading.Lock()


def agent() -> Agent:
    """Return the agent of this process. Creating it takes half a second.

    Raises:
        NixlUnreachable: the agent can't be created.
    """
    with _lock:
        there = _agents.get(os.getpid())
        if there is None:
            there = _agents[os.getpid()] = Agent()
        return there


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Set the environment variables that NIXL and UCX read when an agent is created, except those that the user has set."""
    added = [name for name in _SETTINGS if name not in os.environ]
    os.environ.update({name: _SETTINGS[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _library() -> Any:
    """Import NIXL: ``nixl``, which picks the variant for torch's CUDA, else any installed variant."""
    why = "it is not installed"
    for name in ("nixl", *_VARIANTS):
        if importlib.util.find_spec(name) is not None:
            try:
                return importlib.import_module(f"{name}._api")
            except (ImportError, OSError, RuntimeError) as error:
                why = f"{name} can't be imported: {error}"
    raise NixlUnreachable(f"NIXL can't be used: {why}")


class Agent:
    """Agent of NIXL; each end has one. Its methods may be called by many threads.

    Raises:
        NixlUnreachable: the agent can't be created; the text says why.
    """

    def __init__(self) -> None:
        with _settings():
            api = _library()
            config = api.nixl_agent_config(backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
            try:
                self.nixl = api.nixl_agent(f"monarch-{os.getpid()}-{secrets.token_hex(8)}", config)
            except Exception as error:  # NIXL's exceptions have no common base class
                why = "UCX found no way to other machines, or no descriptors are left"
                raise NixlUnreachable(f"NIXL can't be used: {why} ({error})") from None
        self._peers: dict[str, _Peer] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def carry(self, far: Described, near: Memory, pairs: Sequence[tuple[int, int, int]], *, is_write: bool) -> None:
        """Copy from memory of another process to memory of this one, or the other way if ``is_write``.

        It returns only when UCX does not touch the memory any more, because UCX would continue an operation that was given up.
        UCX notices when the other end ends.

        Args:
            far: memory of the other process.
            near: memory of this process.
            pairs: (address here, address there, nbytes).
            is_write: the direction.

        Raises:
            NixlUnreachable: the copy failed; the contents of ``near`` are undefined.
        """
        nixl = self.nixl
        registration = Registration(self, near)
        mine = registration.described
        with self._using(far):
            ours = nixl.get_xfer_descs([(here, nbytes, mine.device) for here, _, nbytes in pairs], mine.kind)
            theirs = nixl.get_xfer_descs([(there, nbytes, far.device) for _, there, nbytes in pairs], far.kind)
            transfer = nixl.initialize_xfer("WRITE" if is_write else "READ", ours, theirs, far.agent)
            try:
                _wait(nixl, transfer)
            finally:
                nixl.release_xfer_handle(transfer)

    @contextlib.contextmanager
    def _using(self, far: Described) -> Iterator[None]:
        """Register another agent and its memory; unregistering disturbs transfers, so this waits until there are none.

        Raises:
            NixlUnreachable: the agent can't be reached; also in place of all errors of NIXL within the ``with`` block.
        """
        peer = self._enter(far)
        try:
            yield
        except Exception as error:
            peer.is_stale = True
            raise NixlUnreachable(str(error) if isinstance(error, NixlUnreachable) else f"NIXL says {error}") from None
        finally:
            with self._lock:
                peer.users -= 1
                if not peer.users and peer.is_stale:
                    self._forget(far.agent)
                self._changed.notify_all()

    def _enter(self, far: Described) -> _Peer:
        with self._lock:
            for is_last in (False, True):
                self._changed.wait_for(lambda: not self._is_stale(far.agent))
                try:
                    self.nixl.add_remote_agent(far.metadata)
                except Exception as error:
                    if is_last:
                        raise NixlUnreachable(f"NIXL does not reach it ({error})") from None
                    # The agent had registered other memory at this address before.
                    peer = self._peers.setdefault(far.agent, _Peer())
                    peer.is_stale = True
                    if not peer.users:
                        self._forget(far.agent)
                else:
                    break
            peer = self._peers.setdefault(far.agent, _Peer())
            peer.users += 1
            return peer

    def _is_stale(self, name: str) -> bool:
        peer = self._peers.get(name)
        return peer is not None and peer.is_stale

    def _forget(self, name: str) -> None:
        del self._peers[name]
        with contextlib.suppress(Exception):  # NIXL may have forgotten it already
            self.nixl.remove_remote_agent(name)


@dataclass
class _Peer:
    """A registered remote agent: the number of its transfers, and whether it must be registered again for further ones."""

    users: int = 0
    is_stale: bool = False


class Registration:
    """Memory that other processes may access; both the registration and the memory last as long as this object.

    Attributes:
        described: the description that other processes need.

    Raises:
        NixlUnreachable: the memory can't be registered.
    """

    def __init__(self, by: Agent, memory: Memory) -> None:
        nixl, (low, high) = by.nixl, memory.layout.span
        kind, device = ("VRAM", int(memory.device.rpartition(":")[2])) if memory.device else ("DRAM", 0)
        start = memory.address + low
        try:
            registered = nixl.register_memory([(start, high - low, device, "")], kind)
            metadata = nixl.get_partial_agent_metadata(registered, True, ["UCX"])
        except Exception as error:
            raise NixlUnreachable(f"NIXL can't register the memory ({error})") from None
        self.agent = by
        self.memory = memory
        self.described = Described(nixl.name, metadata, kind, device, start, high - low, memory.is_readonly)
        ending = weakref.finalize(self, nixl.deregister_memory, registered)  # before the memory is freed
        ending.atexit = False


def _wait(nixl: Any, transfer: Any) -> None:
    started_at = time.monotonic()
    state = nixl.transfer(transfer)
    while state == "PROC":
        if time.monotonic() - started_at > _SPIN_S:
            time.sleep(_PAUSE_S)
        state = nixl.check_xfer_state(transfer)
    if state != "DONE":
        raise NixlUnreachable("the transfer by NIXL failed")
