"""Messages of profiles and of late ranks."""

from __future__ import annotations

from monarch_kernel.features.profiling.arrivals import GroupArrivals
from monarch_kernel.net.wire.codec import add_messages
from monarch_kernel.net.wire.messages import Message

__all__ = ["Arrived", "GetTime", "ReadProfile", "StartProfile", "StopProfile"]


class StartProfile(Message, frozen=True):
    """Start the profiler of a rank, which answers when it runs; ``memory`` is whether to record allocations."""

    id: int
    memory: bool = False


class ReadProfile(Message, frozen=True):
    """Make a rank whose profiler runs record; it answers with a `recording.Recording` when that is over.

    The controller sends it when the profilers of all ranks run, so that all record the same steps. ``steps`` is their number,
    and ``seconds`` the most that this may take.
    """

    id: int
    steps: int
    seconds: float


class StopProfile(Message, frozen=True):
    """End the profile now; a request to read it is answered with what there is. This message has no answer."""


class GetTime(Message, frozen=True):
    """Ask a rank for the time of its machine, in seconds since 1970; answered at once."""

    id: int


class Arrived(Message, frozen=True):
    """Report when a rank has started some of its last collectives."""

    groups: tuple[GroupArrivals, ...]


add_messages(Arrived, ReadProfile, StartProfile, StopProfile, GetTime)
