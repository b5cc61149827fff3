"""A cable with faults: a process that carries frames between two TAP interfaces in different network namespaces.

It replaces `tc netem`, which many Linux kernels lack. A cut drops frames, as a pulled cable does, and ends no connection.

``python wire.py PID NAME PID NAME SEED`` makes an interface in the namespace of each process. Each line on standard input is
the new `Faults` as JSON; the program prints a line once they are in force. At the end of the input, the process and both
interfaces end.
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
"""Limit of the queue with limited bandwidth, in seconds: frames that would wait for longer are dropped, as by a router."""


@dataclass(frozen=True)
class Faults:
    """The faults of each frame, in both directions.

    Attributes:
        delay_s: delay of each frame.
        jitter_s: largest random delay in addition, so that frames overtake each other.
        loss: share of frames that are dropped.
        doubled: share of frames that come twice.
        bytes_per_s: bandwidth; 0 for no limit.
        is_cut: whether all frames are dropped.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    doubled: float = 0.0
    bytes_per_s: float = 0.0
    is_cut: bool = False


class Wire:
    """Starts and controls the process of a cable.

    Args:
        near: a process in the namespace of one end, and the name of the interface there.
        far: the same for the other end.
        seed: seed of random faults.
    """

    def __init__(self, near: tuple[int, str], far: tuple[int, str], seed: int) -> None:
        ends = [str(each) for each in (*near, *far, seed)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *ends], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.set(Faults())

    def set(self, faults: Faults) -> None:
        """Set the faults; they apply to all frames that come after this returns."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(faults)).encode() + b"\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise OSError(f"the cable's process has ended: {self._process.wait()}")

    def close(self) -> None:
        """Remove the cable."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()


class _Carrier:
    """Carries frames, in the process of a cable.

    Args:
        taps: descriptors of both interfaces.
        seed: seed of random faults.
    """

    def __init__(self, taps: tuple[int, int], seed: int) -> None:
        self._taps = taps
        self._chance = random.Random(seed)
        self._faults = Faults()
        self._waiting: list[tuple[float, int, int, bytes]] = []  # time, order, interface, frame
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
                        self._waiting.clear()  # a pulled cable holds no frames
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
        with contextlib.suppress(OSError):  # the interface is down, or full: the frame is lost
            os.write(tap, frame)


def _tap(pid: int, name: str) -> int:
    """Move this thread into the namespace of a process, and make a TAP interface there."""
    fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(fd)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return tap


def main() -> None:
    """Run the process of a cable."""
    near_pid, near_name, far_pid, far_name, seed = sys.argv[1:]
    Path("/proc/self/comm").write_text("wire")
    taps = _tap(int(near_pid), near_name), _tap(int(far_pid), far_name)
    _Carrier(taps, int(seed)).serve()


if __name__ == "__main__":
    main()
