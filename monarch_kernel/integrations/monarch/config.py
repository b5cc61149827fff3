"""``monarch.config``: checks and keeps the options of Monarch's runtime, which have no effect here."""

from __future__ import annotations

import contextlib
import difflib
import enum
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from monarch_kernel.integrations.monarch.missing import refuse
from monarch_kernel.integrations.monarch.transport import BindSpec, ChannelTransport

__all__ = [
    "Encoding",
    "clear_runtime_config",
    "configure",
    "configured",
    "get_global_config",
    "get_runtime_config",
    "parametrize_config",
    "parametrize_config_pointwise",
]


class Encoding(enum.Enum):
    """The encodings of Monarch's messages."""

    Bincode = 0
    Json = 1
    Multipart = 2


_UNITS_NS = {
    "ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "day": 86_400 * 10**9,
}  # fmt: skip
_SPELLINGS = {
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), "m"),
    **dict.fromkeys(("hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("d", "days"), "day"),
}
_PART = re.compile(r"\s*(\d+)\s*([a-z]+)\s*", re.IGNORECASE)

_DURATIONS = {
    "actor_spawn_max_idle": "30s",
    "channel_net_rx_buffer_full_check_interval": "5s",
    "channel_reconnect_timeout": "1m",
    "channel_tcp_keepalive_idle": "1m",
    "cleanup_timeout": "3s",
    "forwarder_flush_timeout": "5s",
    "get_actor_state_max_idle": "30s",
    "get_proc_state_max_idle": "1m",
    "host_spawn_ready_timeout": "30s",
    "mesh_admin_config_dump_bridge_timeout": "5s",
    "mesh_admin_pyspy_bridge_timeout": "13s",
    "mesh_admin_pyspy_client_timeout": "20s",
    "mesh_admin_pyspy_max_profile_duration": "5m",
    "mesh_admin_pyspy_timeout": "10s",
    "mesh_admin_query_child_timeout": "100ms",
    "mesh_admin_resolve_actor_timeout": "200ms",
    "mesh_admin_single_host_timeout": "3s",
    "mesh_admin_tree_timeout": "10s",
    "mesh_attach_config_timeout": "1m",
    "mesh_orphan_timeout": "1m",
    "mesh_proc_spawn_max_idle": "30s",
    "mesh_terminate_timeout": "10s",
    "message_ack_time_interval": "500ms",
    "message_delivery_timeout": "30s",
    "otel_metric_export_interval": "1s",
    "pending_actor_delivery_timeout": "30s",
    "proc_stop_max_idle": "30s",
    "process_exit_timeout": "10s",
    "process_memory_metric_interval": "5m",
    "rdma_qp_init_timeout": "30s",
    "remote_allocator_heartbeat_interval": "5m",
    "server_heartbeat_interval": "1s",
    "split_max_buffer_age": "50ms",
    "stop_actor_timeout": "10s",
    "stop_grace_period": "10s",
    "supervision_poll_frequency": "10s",
    "supervision_watchdog_timeout": "2m",
}
_NUMBERS = {
    "codec_max_frame_length": 10 << 30,
    "max_cast_dimension_size": 16,
    "max_cast_fanout": 16,
    "mesh_admin_max_concurrent_resolves": 2,
    "mesh_terminate_concurrency": 16,
    "message_ack_every_n_messages": 1000,
    "message_ttl_default": 64,
    "rdma_max_chunk_size_mb": 64,
    "rdma_min_stripe_size_kb": 512,
    "rdma_qps_per_cq": 64,
    "rdma_qps_per_peer": 4,
    "rdma_runtime_worker_threads": 4,
    "rdma_tcp_fallback_parallelism": 1,
    "read_log_buffer": 100,
    "sequencer_max_locked_keys": 128,
    "small_write_threshold": 256,
    "split_max_buffer_size": 5,
    "tail_log_lines": 0,
    "terminated_snapshot_retention": 100,
}
_SWITCHES = {
    "actor_queue_dispatch": False,
    "channel_multipart": True,
    "enable_dest_actor_reordering_buffer": True,
    "enable_file_capture": False,
    "enable_log_forwarding": False,
    "enable_otel_metrics": True,
    "enable_otel_tracing": True,
    "enable_recorder_tracing": True,
    "enable_sqlite_tracing": False,
    "enable_unawaited_python_task_traceback": False,
    "force_file_log": False,
    "mesh_bootstrap_enable_pdeathsig": True,
    "prefix_with_rank": True,
    "rdma_allow_tcp_fallback": True,
    "rdma_cq_poller_per_device": True,
    "rdma_disable_ibverbs": False,
    "rdma_host_odp": False,
    "remote_alloc_bind_to_inaddr_any": False,
    "scuba_log_enter_exit": False,
    "shared_asyncio_runtime": False,
    "use_direct_spawn": False,
}
_TEXTS = {
    "channel_tcp_congestion": "",
    "file_log_level": "",
    "mesh_admin_addr": "[::]:1729",
    "monarch_log_suffix": "",
    "proc_launcher_kind": "",
    "pyspy_bin": "",
    "rdma_ibverbs_target": "",
    "rdma_peer_device_affinity": "",
    "remote_alloc_bootstrap_addr": "",
}
_TRANSPORT, _PORTS = "default_transport", "remote_alloc_allowed_port_range"
_MAY_BE_NONE = {"rdma_max_nics_per_buffer": int, "tokio_worker_threads": int, "mesh_orphan_timeout": str, _PORTS: slice}
"""Options that may be None, and the types of their other values."""
_DEFAULTS: dict[str, Any] = {
    **_DURATIONS,
    **_NUMBERS,
    **_SWITCHES,
    **_TEXTS,
    "default_encoding": Encoding.Multipart,
    "message_latency_sampling_rate": 0.01,
    _TRANSPORT: BindSpec(ChannelTransport.Unix),
    "rdma_max_nics_per_buffer": None,
    "tokio_worker_threads": None,
    _PORTS: None,
}

_set: dict[str, Any] = {}


class InvalidOptionError(ValueError, TypeError):
    """A number is out of the range of its option. Monarch raises a TypeError."""


def configure(**options: Any) -> None:
    """Check options and keep them, for `get_global_config`. Of them, ``mesh_attach_config_timeout`` has an effect.

    Raises:
        TypeError: a value is of another type than the option, or is no duration; then none is kept.
        ValueError: an option is unknown, or a value is not valid; then none is kept.
    """
    _set.update({name: _checked(name, value) for name, value in options.items()})


@contextlib.contextmanager
def configured(**options: Any) -> Iterator[dict[str, Any]]:
    """Keep options within a block; gives all options and their values. The errors are those of `configure`."""
    before = dict(_set)
    configure(**options)
    try:
        yield get_global_config()
    finally:
        _set.clear()
        _set.update(before)


def get_global_config() -> dict[str, Any]:
    """Return all options and their values."""
    return {**_DEFAULTS, **_set}


def get_runtime_config() -> dict[str, Any]:
    """Return the options that were set, and their values."""
    return dict(_set)


def clear_runtime_config() -> None:
    """Set all options to their defaults."""
    _set.clear()


def parametrize_config(**values: Iterable[Any]) -> Callable[[Callable[..., Any]], Any]:
    """Let pytest run a test with each combination of values of options.

    Raises:
        ValueError: there are no options.
    """
    return _parametrized(values, itertools.product)


def parametrize_config_pointwise(**values: Any) -> Callable[[Callable[..., Any]], Any]:
    """Let pytest run a test with the first values of all options, then with the second ones, and so on.

    Raises:
        ValueError: there are no options, or they do not have equally many values.
    """
    lengths = {name: len(each) for name, each in values.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"all options must have equally many values, but these have {lengths}")
    return _parametrized(values, zip)


def _parametrized(values: dict[str, Iterable[Any]], combine: Callable[..., Iterable[Any]]) -> Callable[..., Any]:
    if not values:
        raise ValueError("name at least one option, and its values")
    import pytest

    choices = [dict(zip(values, chosen)) for chosen in combine(*values.values())]
    names = ["-".join(f"{name}={value}" for name, value in choice.items()) for choice in choices]

    def decorate(test: Callable[..., Any]) -> Any:
        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def run_async(*args: Any, _options: dict[str, Any], **kwargs: Any) -> Any:
                with configured(**_options):
                    return await test(*args, **kwargs)

            run: Callable[..., Any] = run_async
        else:

            @functools.wraps(test)
            def run_sync(*args: Any, _options: dict[str, Any], **kwargs: Any) -> Any:
                with configured(**_options):
                    return test(*args, **kwargs)

            run = run_sync
        signature = inspect.signature(test)
        option = inspect.Parameter("_options", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("_options", choices, ids=names)(run)

    return decorate


def _checked(name: str, value: Any) -> Any:
    """Return the value as it is kept."""
    if name not in _DEFAULTS:
        near = difflib.get_close_matches(name, _DEFAULTS)
        hint = f"did you mean {' or '.join(near)}?" if near else "get_global_config() has all options"
        raise ValueError(f"unknown option {name!r}; {hint}")
    if name == _TRANSPORT:
        return value if isinstance(value, BindSpec) else BindSpec(value)
    if value is None and name in _MAY_BE_NONE:
        return None
    wanted: Any = _MAY_BE_NONE.get(name) or type(_DEFAULTS[name])
    if not isinstance(value, (int, float) if wanted is float else wanted) or (
        isinstance(value, bool) and wanted is not bool
    ):
        or_none = " or None" if name in _MAY_BE_NONE else ""
        raise TypeError(f"{name} must be a {wanted.__name__}{or_none}, not {value!r}")
    if name in _DURATIONS:
        return _duration(name, str(value))
    least = 1 if name in _MAY_BE_NONE else 0
    if wanted is int and value < least:
        raise InvalidOptionError(f"{name} must be at least {least}, not {value}")
    return float(value) if wanted is float else value


def seconds_of(name: str) -> float:
    """Return the value of an option that is a duration, in seconds."""
    return _nanoseconds(name, get_global_config()[name]) / 1e9


def _nanoseconds(name: str, text: str) -> int:
    total_ns, at = 0, 0
    while at < len(text) or not text:
        part = _PART.match(text, at)
        unit = part and _SPELLINGS.get(part[2].lower(), part[2].lower())
        if part is None or unit not in _UNITS_NS:
            raise TypeError(f"Invalid duration format: {name} must be a text such as '30s' or '1m 30s', not {text!r}")
        total_ns += int(part[1]) * _UNITS_NS[unit]
        at = part.end()
    return total_ns


def _duration(name: str, text: str) -> str:
    """Return a duration in the largest units, such as ``1m 30s`` for ``90s``."""
    total_ns, words = _nanoseconds(name, text), []
    for unit, size_ns in reversed(_UNITS_NS.items()):
        count, total_ns = divmod(total_ns, size_ns)
        if count:
            words.append(f"{count}{unit}{'s' if unit == 'day' and count > 1 else ''}")
    return " ".join(words) or "0s"


def __getattr__(name: str) -> NoReturn:
    refuse("monarch.config", name)
