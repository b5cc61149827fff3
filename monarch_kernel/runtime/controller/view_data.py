"""Snapshots of meshes, ranks and hosts for views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

from monarch_kernel.base.events import HostState, HostView, MeshView, RankView
from monarch_kernel.runtime.controller.process_records import NO_READING, HostRecord, RankRecord

__all__ = ["NEVER_CONNECTED", "host_views", "mesh_view"]

NEVER_CONNECTED = "HostNeverConnected"


def host_views(records: Mapping[int, HostRecord], hosts: Sequence[int]) -> tuple[HostView, ...]:
    """Hosts as they are now, each with a unique name: agents on one machine are distinguished by their numbers."""
    former = {record.successor: record.hostname for record in list(records.values()) if record.successor}
    views = [_host_view(host, records.get(host)) for host in hosts]
    # A host that is starting counts under the name of the host it replaces, so that others keep their names meanwhile.
    names = Counter(view.name or former.get(view.number, "") for view in views)
    return tuple(
        replace(view, name=f"{view.name}#{view.number}") if view.name and names[view.name] > 1 else view
        for view in views
    )


def _host_view(host: int, record: HostRecord | None) -> HostView:
    if record is None:  # it was just requested
        return HostView(host, "", "starting")
    if not record.gone:
        return HostView(host, record.hostname, "up" if record.up else "starting")
    end = record.end
    why, log = (end.message, end.last_lines) if end is not None else ("", ())
    is_released = end is not None and end.kind == "stopped"
    is_silent = end is not None and end.etype == NEVER_CONNECTED
    state: HostState = "released" if is_released else "lost"
    return HostView(host, record.hostname, state, why, log, is_silent)


def mesh_view(
    name: str,
    axes: dict[str, int],
    ranks: Sequence[RankRecord | None],
    hosts: Mapping[int, HostRecord],
    engine_of: Callable[[int], str | None],
    now: float,
    refused_connections: int = 0,
) -> MeshView:
    """A mesh as it is now.

    Args:
        name: The name of the mesh.
        axes: The sizes of its axes.
        ranks: In order; None for a rank that was just requested.
        hosts: All hosts, by number.
        engine_of: Returns the name of the engine of a host, by the host's number; None for this machine itself.
        now: The time.
        refused_connections: How many connections the controller has refused.
    """
    numbers = dict.fromkeys(record.host for record in ranks if record is not None)
    on = {view.number: view for view in host_views(hosts, tuple(numbers))}
    rows = []
    for rank, (record, point) in enumerate(zip(ranks, _points(tuple(axes.items())))):
        if record is None:
            rows.append(RankView(rank, point, "starting"))
        else:
            rows.append(_rank_view(rank, point, record, on[record.host].name, now))
    where = _where(on, engine_of)
    if where:  # else no other machine can connect
        counts = [
            ("", refused_connections),
            *((view.name, hosts[host].refused_connections) for host, view in on.items()),
        ]
        where["refused_connections"] = tuple((name, count) for name, count in counts if count)
    is_up = all(record is not None and (record.up or record.up_at) for record in ranks)
    up_s = min((now - record.up_at for record in ranks if record is not None), default=0.0) if is_up else 0.0
    return MeshView(name, tuple(axes.items()), tuple(rows), age_s=up_s, is_up=is_up, **where)


@lru_cache(maxsize=16)
def _points(axes: tuple[tuple[str, int], ...]) -> tuple[tuple[tuple[str, int], ...], ...]:
    """All points of a mesh, in the order of its ranks; cached, because views ask for them often."""
    return tuple(product(*([(axis, coord) for coord in range(size)] for axis, size in axes)))


def _rank_view(rank: int, point: tuple[tuple[str, int], ...], record: RankRecord, host: str, now: float) -> RankView:
    state = record.state
    activity = next(iter(list(record.open_requests.values())), "") if state == "running" else ""
    reading = record.reading if record.death is None else NO_READING
    return RankView(
        rank,
        point,
        state,
        activity,
        now - record.busy_since if activity else 0.0,
        host,
        record.pid,
        record.device or record.spec.device.replace("auto", ""),  # the host has not reported which yet
        reading.rss_nbytes,
        reading.cpu_percent,
        record.last_error,
        record.last_line,
        record.spec.incarnation,
        gpu_nbytes=reading.gpu_nbytes,
        gpu_total_nbytes=reading.gpu_total_nbytes,
        gpu_percent=reading.gpu_percent,
        failed_s=now - record.failed_at if record.last_error else 0.0,
    )


def _where(hosts: Mapping[int, HostView], engine_of: Callable[[int], str | None]) -> dict[str, Any]:
    """The part of a mesh's view about its hosts: their engines, how many there are, and which are lost."""
    by_host = {host: engine_of(host) for host in hosts}
    engines = dict.fromkeys(engine for engine in by_host.values() if engine is not None)
    if not engines:
        return {}
    lost = tuple(view for view in hosts.values() if view.state == "lost" and by_host[view.number] is not None)
    count = f"{len(hosts)} host{'s' * (len(hosts) != 1)}{f' ({len(lost)} lost)' if lost else ''}"
    return {"where": f"{', '.join(engines)}: {count}", "lost_hosts": lost}
