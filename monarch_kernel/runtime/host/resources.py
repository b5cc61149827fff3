"""Assigns a rank its GPU, its threads and its network interface on its host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from monarch_kernel.base.text import plural, were
from monarch_kernel.net.wire.messages import RankSpec
from monarch_kernel.runtime.host.gpus import VISIBLE

__all__ = ["TooFewGpusError", "assign_resources"]


class TooFewGpusError(Exception):
    """Each rank needs a separate GPU, and the host does not have enough.

    Attributes:
        needed: the number of ranks of the host.
        found: the number of GPUs.
    """

    def __init__(self, needed: int, found: int, hostname: str) -> None:
        self.needed = needed
        self.found = found
        super().__init__(
            f"{plural(needed, 'rank')} with a GPU each {were(needed)} requested on every host, but host "
            f"{hostname} has {plural(found, 'GPU')}; request fewer ranks per host, "
            f"hosts with {plural(needed, 'GPU')}, or device cpu"
        )


def assign_resources(
    spec: RankSpec,
    environment: Mapping[str, str],
    gpus: Callable[[str | None], Sequence[str]],
    hostname: str,
    interface: str,
    threads: int = 0,
) -> RankSpec:
    """Fill in a rank's share of its host; a spec that the controller has completed (`threads` is set) is returned unchanged.

    Values that the user has set, for the mesh or on the host, stay. If the user has named GPUs for the mesh, ranks share those,
    in their order, also if one occurs several times. The device ``auto`` means ``cuda`` if there is a GPU for each rank. With
    ``visible``, each rank sees all GPUs that the user has named for the mesh or on the host, and its code chooses.

    Args:
        spec: specification from the controller.
        environment: environment of the host.
        gpus: returns the GPUs of the host that its processes may use, of those that a value of CUDA_VISIBLE_DEVICES names for
            the mesh; of all, if it is None.
        hostname: name of the host for error messages.
        interface: the interface by which the host reaches the others; empty if unknown.
        threads: the number of threads of a rank on the controller's machine; 0 for a host elsewhere, where a rank decides.

    Raises:
        TooFewGpusError: each rank needs a GPU, and there are too few.
    """
    if spec.threads:
        return spec
    per_host, device = spec.local_world_size, spec.device
    found = gpus(spec.env.get(VISIBLE)) if device in ("auto", "cuda") else ()
    if device == "auto":
        device = "cuda" if len(found) >= per_host else "cpu"
    elif device == "cuda" and len(found) < per_host:
        raise TooFewGpusError(per_host, len(found), hostname)
    env = dict(spec.env)
    if device == "visible":
        device = "cpu"  # of process groups that cells use: it is not known which GPU the code of a rank takes
        if VISIBLE in environment:
            env.setdefault(VISIBLE, environment[VISIBLE])
    elif device == "cuda":
        env[VISIBLE] = found[spec.local_rank]
    elif spec.device == "cpu":
        env[VISIBLE] = ""
    else:
        env.setdefault(VISIBLE, "")
    if spec.world_size == per_host:
        names = {"GLOO_SOCKET_IFNAME": "lo"}  # otherwise gloo uses the interface that the hostname resolves to
    else:
        names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}
    for name, value in names.items():
        if name not in environment:
            env.setdefault(name, value)
    return spec.settled(device, env, threads)
