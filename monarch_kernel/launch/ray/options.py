"""The options of a Ray launcher, which it sends to its driver process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from monarch_kernel.launch.base import agent_command

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """The options of a launcher, which are the first line that it sends to its driver process.

    Attributes:
        address: address of the cluster.
        bundle: resource -> amount that each host takes.
        command: command to run on a host; an empty interpreter stands for the one that Ray runs there.
        runtime_env: Ray's runtime environment of the actors.
        grows: whether nodes that do not exist yet may join, as with an autoscaler.
        group: hex id of a placement group of the user.
        places: for each host that the user has room for, the id of a node, and the value of CUDA_VISIBLE_DEVICES there.
        occupied: ids of nodes that must not be used.
        last_resort: ids of nodes to use only as a last resort.
    """

    address: str
    bundle: dict[str, float]
    command: tuple[str, ...] = ("", *agent_command()[1:])
    runtime_env: dict[str, Any] | None = None
    grows: bool = False
    group: str = ""
    places: tuple[tuple[str, str | None], ...] = ()
    occupied: tuple[str, ...] = ()
    last_resort: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Encode as a line of JSON."""
        return json.dumps(vars(self)).encode() + b"\n"
