"""What a rank is given of its host, where the controller could not know the host: a GPU, and the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monarch_kernel.net.wire.messages import RankSpec

__all__ = ["TooFewGpusError", "gpus_named", "shared"]

VISIBLE = "CUDA_VISIBLE_DEVICES"


class TooFewGpusError(Exception):
    """A rank was to have a GPU of its own, and the host has not as many."""


def shared(
    spec: RankSpec, environment: Mapping[str, str], gpus: Sequence[str], hostname: str, interface: str
) -> RankSpec:
    """A spec with this rank's share of its host filled in; one that the controller has settled (`threads` is given) as it is.

    What the user has set, for the mesh or on the host, stays. GPUs that he has named for the mesh are those that are shared.

    Args:
        spec: from the controller.
        environment: of the agent.
        gpus: of the host, as the agent may use them.
        hostname: for the user.
        interface: by which the host reaches the others; empty if that is not known.

    Raises:
        TooFewGpusError: the rank is to have a GPU, and there are too few.
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
            f"{per_host} ranks with a GPU each were asked for on every host, and host {hostname} has {counted}; "
            f"ask for fewer ranks per host, for hosts with {per_host} GPUs, or for device cpu"
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
    """The GPUs that a value of CUDA_VISIBLE_DEVICES names."""
    return [name for name in visible.replace(" ", "").split(",") if name and name != "-1"]
