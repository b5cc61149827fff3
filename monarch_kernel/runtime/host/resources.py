"""Assigns a rank its GPU and network interface on a host that the controller did not know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monarch_kernel.net.wire.messages import RankSpec

__all__ = ["TooFewGpusError", "assign_resources", "gpus_named"]

VISIBLE = "CUDA_VISIBLE_DEVICES"


class TooFewGpusError(Exception):
    """Each rank needs a separate GPU, and the host does not have enough."""


def assign_resources(
    spec: RankSpec, environment: Mapping[str, str], gpus: Sequence[str], hostname: str, interface: str
) -> RankSpec:
    """Fill in a rank's share of its host; a spec that the controller has completed (`threads` is set) is returned unchanged.

    Values that the user has set, for the mesh or on the host, stay. If the user has named GPUs for the mesh, ranks share those.

    Args:
        spec: specification from the controller.
        environment: environment of the agent.
        gpus: GPUs of the host that the agent may use.
        hostname: name of the host for error messages.
        interface: the interface by which the host reaches the others; empty if unknown.

    Raises:
        TooFewGpusError: each rank needs a GPU, and there are too few.
    """
    if spec.threads:
        return spec
    per_host = spec.local_world_size
    gpus = gpus_named(spec.env[VISIBLE]) if VISIBLE in spec.env else gpus
    device = spec.device
    if device == "auto":
        device = "cuda" if len(gpus) >= per_host else "cpu"
    elif device == "cuda" and len(gpus) < per_host:
        counted = f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'}"
        raise TooFewGpusError(
            f"{per_host} ranks with a GPU each were requested on every host, but host {hostname} has {counted}; "
            f"request fewer ranks per host, hosts with {per_host} GPUs, or device cpu"
        )
    env = dict(spec.env)
    env[VISIBLE] = gpus[spec.local_rank] if device == "cuda" else ""
    if spec.world_size == per_host:
        names = {"GLOO_SOCKET_IFNAME": "lo"}
    else:
        names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}
    for name, value in names.items():
        if name not in environment:
            env.setdefault(name, value)
    return spec.settled(device, env)


def gpus_named(visible: str) -> list[str]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names."""
    return [name for name in visible.replace(" ", "").split(",") if name and name != "-1"]
