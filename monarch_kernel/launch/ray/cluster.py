"""A driver's view of a Ray cluster: its nodes, their resources, and placement groups; and errors about missing resources."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from monarch_kernel.base.text import plural
from monarch_kernel.launch.ray import agent_actor

__all__ = ["Cluster", "Node", "amount", "explain", "in_numbers"]

_CONNECT_S = 5.0


@dataclass(frozen=True)
class Node:
    """A node that Ray believes to be alive.

    Attributes:
        id: the node id, in hexadecimal.
        address: its IP address.
        total: all its resources.
        free: its free resources; None if not known.
    """

    id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float] | None = None

    def has(self, bundle: Mapping[str, float]) -> bool:
        """Return whether it has these resources, free or in use."""
        return _covers(self.total, bundle)

    def has_free(self, bundle: Mapping[str, float]) -> bool:
        """Return whether it has these resources free, as far as is known."""
        return self.free is None or _covers(self.free, bundle)


def _covers(resources: Mapping[str, float], bundle: Mapping[str, float]) -> bool:
    return all(resources.get(name, 0.0) >= count for name, count in bundle.items())


def amount(resources: Mapping[str, float], names: Collection[str]) -> str:
    """Format amounts of resources, such as ``8 GPUs and 1 CPU``."""

    def one(name: str) -> str:
        count = f"{resources.get(name, 0.0):g}"
        return f"{count} {name}s" if name in ("CPU", "GPU") and count != "1" else f"{count} {name}"

    *most, last = [one(name) for name in sorted(names, key=lambda name: (name != "GPU", name != "CPU", name))]
    return f"{', '.join(most)} and {last}" if most else last


def in_numbers(count: int, bundle: Mapping[str, float], nodes: Sequence[Node], taken: Collection[str]) -> str:
    """Say in numbers why the cluster can't provide that many hosts; empty if it can, as far as is known.

    Args:
        count: number of hosts.
        bundle: resources of each host.
        nodes: nodes that are alive.
        taken: ids of nodes that have a host of this mesh, or had one that does not answer.
    """
    able = [node for node in nodes if node.has(bundle)]
    left = [node for node in able if node.id not in taken]
    if len(left) >= count:
        return ""
    kinds = Counter(amount(node.total, bundle) for node in nodes)
    have = "; ".join(f"{many} with {what}" for what, many in kinds.most_common()) or "it has none"
    text = (
        f"asked for {plural(count, 'host')} with {amount(bundle, bundle)}{' each' * (count > 1)}, a node for each; "
        f"the cluster has {plural(len(able), 'such node')} (of {plural(len(nodes), 'node')}: {have})"
    )
    used = len(able) - len(left)
    return f"{text}, but {used} of these already {'has' if used == 1 else 'have'} a host of this mesh" if used else text


def explain(error: BaseException) -> str:
    """Format an error of Ray in one line, without its tables of ids."""
    tables = ("class_name:", "actor_id:", "pid:", "namespace:", "ip:", "name:")
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith(tables)]
    return " ".join(kept[-2:]) if kept else type(error).__name__


class Cluster:
    """The connection of this process to a cluster.

    Args:
        ray: the library, connected.
    """

    def __init__(self, ray: ModuleType) -> None:
        from ray.util import scheduling_strategies
        from ray.util.placement_group import PlacementGroup

        self._ray = ray
        self._pin = scheduling_strategies.NodeAffinitySchedulingStrategy
        self._in_group = scheduling_strategies.PlacementGroupSchedulingStrategy
        self._group_type = PlacementGroup
        self._is_client = bool(ray.util.client.ray.is_connected())
        self.error: type[Exception] = ray.exceptions.RayError
        self.unavailable: type[Exception] = ray.exceptions.ActorUnavailableError
        ray.cloudpickle.register_pickle_by_value(agent_actor)
        self._actor_class = ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=4)(agent_actor.AgentActor)

    @classmethod
    async def connect(cls, address: str) -> Cluster:
        """Connect this process as a separate driver.

        Raises:
            ConnectionError: there is no cluster, or it can't be reached.
            RuntimeError: the cluster runs another version of Ray.
            ImportError: Ray, or its client, is not installed.
        """
        import ray

        if address not in ("auto", "local"):
            await _knock(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            if address != "auto":
                raise
            raise ConnectionError(
                "found no Ray cluster from this machine; start one with `ray start --head`, join one with "
                "`ray start --address=HOST:PORT`, or name one with --address HOST:PORT or ray://HOST:PORT"
            ) from error
        return cls(ray)

    def disconnect(self) -> None:
        """End the job and everything that belongs to it."""
        self._ray.shutdown()

    def nodes(self) -> list[Node]:
        """Return the nodes that Ray believes to be alive."""
        free = {} if self._is_client else self._free()
        return [
            Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"]))
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def reserve(self, count: int, bundle: Mapping[str, float], taken: Collection[str]) -> Any:
        """Request a placement group with that many bundles, each on a different node that is not taken."""
        make = self._ray.util.placement_group
        more: dict[str, Any] = {}
        if taken and "bundle_label_selector" in inspect.signature(make).parameters:  # Ray 2.40 does not support it
            more["bundle_label_selector"] = [{"ray.io/node-id": f"!in({','.join(sorted(taken))})"}] * count
        return make([dict(bundle)] * count, strategy="STRICT_SPREAD", **more)

    def chosen(self, group: Any) -> list[str]:
        """Return the ids of the nodes of a placement group; empty while it is pending."""
        table = self._ray.util.placement_group_table(group)
        nodes = table["bundles_to_node_id"]
        return [nodes[i] for i in range(len(nodes))] if table["state"] == "CREATED" else []

    def remove(self, group: Any) -> None:
        """Remove a placement group, which frees its resources."""
        self._ray.util.remove_placement_group(group)

    def on_node(self, node: str) -> Any:
        """Return the scheduling strategy for exactly this node."""
        return self._pin(node, soft=False)

    def in_bundle(self, group: str, index: int) -> Any:
        """Return the scheduling strategy for a bundle of a placement group that another driver created."""
        handle = self._group_type(self._ray.PlacementGroupID(bytes.fromhex(group)))
        return self._in_group(handle, placement_group_bundle_index=index)

    def make_actor(self, where: Any, bundle: Mapping[str, float], runtime_env: Mapping[str, Any] | None) -> Any:
        """Create an `AgentActor` that takes these resources; return at once."""
        others = {name: count for name, count in bundle.items() if name not in ("CPU", "GPU")}
        options = {
            "scheduling_strategy": where,
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "resources": others or None,
            "runtime_env": dict(runtime_env) if runtime_env else None,
        }
        return self._actor_class.options(**options).remote()

    def kill(self, actor: Any) -> None:
        """Kill an actor."""
        self._ray.kill(actor)

    def _free(self) -> dict[str, dict[str, float]]:
        from ray._private import state  # the only source of free resources by node without the dashboard

        available: Callable[[], dict[str, dict[str, float]]] = state.available_resources_per_node
        return available()


async def _knock(address: str) -> None:
    """Check that something listens at an address, because Ray itself takes long to find out."""
    host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if not host or not port.isdecimal():
        raise ConnectionError(
            f"{address!r} is not an address of a Ray cluster; write auto, HOST:PORT or ray://HOST:PORT"
        )
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), _CONNECT_S)
    except asyncio.TimeoutError:
        raise ConnectionError(f"connecting to {address} timed out after {_CONNECT_S:g} s") from None
    except OSError as error:
        raise ConnectionError(f"can't reach a Ray cluster at {address}: {error.strerror or error}") from error
    writer.close()
