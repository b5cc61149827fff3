"""What a launcher wants of Ray: the first line that it sends to the process which talks to that."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from monarch_kernel.launch.base import agent_command

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """What a launcher wants: the first line that it sends.

    Attributes:
        address: of the cluster.
        bundle: resource -> how much of it each host takes.
        command: what is run on a host; the interpreter is left out for that with which Ray runs.
        runtime_env: Ray's, of the actors.
        grows: whether nodes that are missing may come.
        group: hex id of a placement group of the user's.
        places: id of a node, and what is the value of CUDA_VISIBLE_DEVICES there, for each host that the user has room for.
        occupied: ids of nodes that are not taken.
        doubted: ids of nodes that are taken only if there are no others.
    """

    address: str
    bundle: dict[str, float]
    command: tuple[str, ...] = ("", *agent_command()[1:])
    runtime_env: dict[str, Any] | None = None
    grows: bool = False
    group: str = ""
    places: tuple[tuple[str, str | None], ...] = ()
    occupied: tuple[str, ...] = ()
    doubted: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """As a line."""
        return json.dumps(vars(self)).encode() + b"\n"
