"""A cable with faults: a process that carries frames between two TAP interfaces, each in a network namespace of its own.

Why not `tc netem`: many kernels come without it, so it could be relied upon nowhere. A cut here is a cut: frames are dropped,
nobody is told, and no connection ends.

``python wire.py PID NAME PID NAME SEED`` makes an interface in the namespace of each process. Each line on standard input is
the new `Faults` as JSON, and is answered with a line when it holds. When the input ends so do the process and both interfaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Faults", "Wire"]

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_QUEUE_S = 0.25
"""What would wait longer than this for its turn, where bytes per second are limited, is dropped, as a router does."""


@dataclass(frozen=True)
class Faults:
    """What happens to each frame, in both directions.

    Attributes:
        delay_s: how much later it comes.
        jitter_s: up to how much later than that, by chance; so frames overtake each other.
        loss: which part of all is dropped.
        doubled: which part of all comes twice.
        bytes_per_s: how much there is room for; 0 for no limit.
        is_cut: whether nothing comes at all.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    doubled: float = 0.0
    bytes_per_s: float = 0.0
    is_cut: bool = False


class Wire:
    """The process, for the one who has started it.

    Args:
        near: a process in the namespace of the one end, and what the interface there is called.
        far: the same of the other end.
        seed: of what happens by chance.
    """

    def __init__(self, near: tuple[int, str], far: tuple[int, str], seed: int) -> None:
        ends = [str(each) for each in (*near, *far, seed)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *ends], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.set(Faults())

    def set(self, faults: Faults) -> None:
        """From when this returns on, this is what happens to frames that come."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(faults)).encode() + b"\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise OSError(f"the cable's process has ended: {self._process.wait()}")

    def close(self) -> None:
        """Take the cable away."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()


class _Carrier:
    """What the process does.

    Args:
        taps: descriptors of both interfaces.
        seed: of what happens by chance.
    """

    def __init__(self, taps: tuple[int, int], seed: int) -> None:
        self._taps = taps
        self._chance = random.Random(seed)
        self._faults = Faults()
        self._waiting: list[tuple[float, int, int, bytes]] = []  # when, in which order, to which interface, what
        self._count = 0
        self._free_at = dict.fromkeys(taps, 0.0)

    def serve(self) -> None:
        commands = b""
        near, far = self._taps
        while True:
            timeout_s = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            readable, _, _ = select.select([0, near, far], [], [], timeout_s)
            now = time.monotonic()
            for tap, other in ((near, far), (far, near)):
                if tap in readable:
                    for _ in range(64):
                        try:
                            self._take(os.read(tap, 1 << 16), other, now)
                        except BlockingIOError:
                            break
            while self._waiting and self._waiting[0][0] <= now:
                _, _, tap, frame = heapq.heappop(self._waiting)
                self._put(tap, frame)
            if 0 in readable:
                data = os.read(0, 1 << 16)
                if not data:
                    return
                *lines, commands = (commands + data).split(b"\n")
                for line in lines:
                    self._faults = Faults(**json.loads(line))
                    if self._faults.is_cut:
                        self._waiting.clear()  # a cable that is pulled holds nothing
                    os.write(1, b"\n")

    def _take(self, frame: bytes, tap: int, now: float) -> None:
        faults, chance = self._faults, self._chance
        if faults.is_cut or (faults.loss and chance.random() < faults.loss):
            return
        for _ in range(1 + bool(faults.doubled and chance.random() < faults.doubled)):
            begin = now
            if faults.bytes_per_s:
                begin = max(now, self._free_at[tap])
                if begin > now + _QUEUE_S:
                    return
                begin = self._free_at[tap] = begin + len(frame) / faults.bytes_per_s
            due = begin + faults.delay_s + (faults.jitter_s * chance.random() if faults.jitter_s else 0.0)
            if due <= now and not self._waiting:
                self._put(tap, frame)
            else:
                self._count += 1
                heapq.heappush(self._waiting, (due, self._count, tap, frame))

    def _put(self, tap: int, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # it is down, or full: the frame is lost
            os.write(tap, frame)


def _tap(pid: int, name: str) -> int:
    """A new TAP interface in the namespace of a process, where this thread is from now on."""
    fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(fd)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return tap


def main() -> None:
    """Be the cable."""
    near_pid, near_name, far_pid, far_name, seed = sys.argv[1:]
    Path("/proc/self/comm").write_text("wire")
    taps = _tap(int(near_pid), near_name), _tap(int(far_pid), far_name)
    _Carrier(taps, int(seed)).serve()


if __name__ == "__main__":
    main()
