"""``monarch.config``: checks and keeps the options of Monarch's runtime, which have no effect here."""

from __future__ import annotations

import contextlib
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
    "cleanup_timeout": "3s",
    "get_actor_state_max_idle": "30s",
    "get_proc_state_max_idle": "1m",
    "host_spawn_ready_timeout": "30s",
    "mesh_attach_config_timeout": "1m",
    "mesh_orphan_timeout": "1m",
    "mesh_proc_spawn_max_idle": "30s",
    "mesh_terminate_timeout": "10s",
    "message_ack_time_interval": "500ms",
    "message_delivery_timeout": "30s",
    "proc_stop_max_idle": "30s",
    "process_exit_timeout": "10s",
    "remote_allocator_heartbeat_interval": "5m",
    "split_max_buffer_age": "50ms",
    "stop_actor_timeout": "10s",
    "supervision_poll_frequency": "10s",
    "supervision_watchdog_timeout": "2m",
}
_NUMBERS = {
    "codec_max_frame_length": 10 << 30,
    "max_cast_dimension_size": 16,
    "mesh_terminate_concurrency": 16,
    "message_ack_every_n_messages": 1000,
    "message_ttl_default": 64,
    "rdma_max_chunk_size_mb": 64,
    "rdma_min_stripe_size_kb": 0,
    "rdma_qps_per_cq": 1,
    "rdma_runtime_worker_threads": 4,
    "read_log_buffer": 100,
    "small_write_threshold": 256,
    "split_max_buffer_size": 5,
    "tail_log_lines": 0,
}
_SWITCHES = {
    "actor_queue_dispatch": False,
    "channel_multipart": True,
    "enable_dest_actor_reordering_buffer": True,
    "enable_file_capture": False,
    "enable_log_forwarding": False,
    "force_file_log": False,
    "mesh_bootstrap_enable_pdeathsig": True,
    "prefix_with_rank": True,
    "rdma_allow_tcp_fallback": True,
    "rdma_cq_poller_per_device": False,
    "rdma_disable_ibverbs": False,
    "remote_alloc_bind_to_inaddr_any": False,
    "shared_asyncio_runtime": False,
}
_TEXTS = {
    "channel_tcp_congestion": "",
    "mesh_admin_addr": "[::]:1729",
    "pyspy_bin": "",
    "rdma_ibverbs_target": "",
    "rdma_peer_device_affinity": "",
    "remote_alloc_bootstrap_addr": "",
}
_TRANSPORT, _NICS, _PORTS = "default_transport", "rdma_max_nics_per_buffer", "remote_alloc_allowed_port_range"
_DEFAULTS: dict[str, Any] = {
    **_DURATIONS,
    **_NUMBERS,
    **_SWITCHES,
    **_TEXTS,
    "default_encoding": Encoding.Multipart,
    "message_latency_sampling_rate": 0.01,
    _TRANSPORT: BindSpec(ChannelTransport.Unix),
    _NICS: None,
    _PORTS: None,
}

_set: dict[str, Any] = {}


def configure(**options: Any) -> None:
    """Check options and keep them, for `get_global_config`; they have no effect.

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
        raise ValueError(f"unknown option {name!r}; the options are {', '.join(sorted(_DEFAULTS))}")
    if name == _TRANSPORT:
        return value if isinstance(value, BindSpec) else BindSpec(value)
    if name == _NICS:
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"{name} must be an int or None, not {value!r}")
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
        return value
    wanted: Any = slice if name == _PORTS else type(_DEFAULTS[name])
    if name == _PORTS and value is None:
        return value
    if not isinstance(value, (int, float) if wanted is float else wanted) or (
        isinstance(value, bool) and wanted is not bool
    ):
        raise TypeError(f"{name} must be a {wanted.__name__}, not {value!r}")
    if name in _DURATIONS:
        return _duration(name, str(value))
    if name in _NUMBERS and value < 0:
        raise ValueError(f"{name} must be at least 0, not {value}")
    return value


def _duration(name: str, text: str) -> str:
    """Return a duration in the largest units, such as ``1m 30s`` for ``90s``."""
    total_ns, at = 0, 0
    while at < len(text) or not text:
        part = _PART.match(text, at)
        unit = part and _SPELLINGS.get(part[2].lower(), part[2].lower())
        if part is None or unit not in _UNITS_NS:
            raise TypeError(f"Invalid duration format: {name} must be a text such as '30s' or '1m 30s', not {text!r}")
        total_ns += int(part[1]) * _UNITS_NS[unit]
        at = part.end()
    words = []
    for unit, size_ns in reversed(_UNITS_NS.items()):
        count, total_ns = divmod(total_ns, size_ns)
        if count:
            words.append(f"{count}{unit}{'s' if unit == 'day' and count > 1 else ''}")
    return " ".join(words) or "0s"


def __getattr__(name: str) -> NoReturn:
    refuse("monarch.config", name)
