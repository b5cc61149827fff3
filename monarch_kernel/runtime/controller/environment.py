"""What ranks on the controller's machine need so that they have its environment of now. Pure.

Ranks are forked from a process that has the environment in which the host agent was started. What the program has set and
removed since then goes to each new rank with its spec, and stays there for the processes that replace it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

__all__ = ["Changes", "changes", "read_at_start"]

MAX_NBYTES = 1 << 17
"""Limit for all changes; a packet carries them to the process that forks the ranks. Linux has the same limit for a variable."""

_OF_EACH_RANK = frozenset(
    [
        "CUDA_VISIBLE_DEVICES",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MONARCH_AGENT",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
    ]
)
_PREFIX_OF_EACH_RANK = "TORCHELASTIC_"

# Read by the dynamic loader, the C library, Python, and the libraries that `import torch` loads, when these are loaded; found
# by a recording of getenv and os.environ in the process that ranks are forked from.
_AT_START = frozenset(
    [
        "GLIBC_TUNABLES",
        "THP_MEM_ALLOC_ENABLE",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "KINETO_USE_DAEMON",
        "OPENSSL_CONF",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "TORCH_BLAS_PREFER_CUBLASLT",
        "TORCH_CPP_LOG_LEVEL",
        "TORCH_CUDA_SANITIZER",
        "TORCH_CUSTOM_TERMINATE",
        "TORCH_DEVICE_BACKEND_AUTOLOAD",
        "TORCH_DTRACE",
        "TORCH_FAKE_TENSOR_DEBUG",
        "TORCH_LINALG_PREFER_CUSOLVER",
        "TORCH_SHOW_CPP_STACKTRACES",
        "TORCH_TRACE",
        "TORCH_USE_RTLD_GLOBAL",
    ]
)
_PREFIXES_AT_START = (
    "DNNL_",
    "GFORTRAN_",
    "GOMP_",
    "GOTO_",
    "KMP_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "MKLDNN_",
    "NPY_",
    "NUMPY_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH_JIT",
    "TORCHDYNAMO_",
    "TORCH_COMPILE_",
    "TORCH_LOGS",
)
_LATER = frozenset(
    ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "PYTHONPATH", "PYTHONSTARTUP")
)  # `worker.environment` sets threads


class Changes(NamedTuple):
    """How the environment of the program differs from that of the host agent.

    Attributes:
        values: variables that were set since, with their values.
        removed: variables that were removed since.
        left_out: variables that were set since and can't be sent: they are too long, or are not text in UTF-8.
    """

    values: dict[str, str]
    removed: tuple[str, ...]
    left_out: tuple[str, ...]


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> Changes:
    """Compare two environments, except for variables that ranks get from the product, such as ``RANK``."""
    values: dict[str, str] = {}
    left_out: list[str] = []
    room = MAX_NBYTES
    for name in sorted(now, key=lambda each: len(now[each])):
        if before.get(name) == now[name] or _is_of_each_rank(name):
            continue
        try:
            nbytes = len(name.encode()) + len(now[name].encode())
        except UnicodeEncodeError:  # bytes that os.environ has as surrogates
            nbytes = MAX_NBYTES + 1
        if nbytes > room:
            left_out.append(name)
        else:
            room -= nbytes
            values[name] = now[name]
    removed = sorted(name for name in before if name not in now and not _is_of_each_rank(name))
    return Changes(dict(sorted(values.items())), tuple(removed), tuple(sorted(left_out)))


def read_at_start(names: Iterable[str]) -> list[str]:
    """Return the variables that take effect only when a process starts, not in a fork of it."""
    return [name for name in names if name not in _LATER and (name in _AT_START or name.startswith(_PREFIXES_AT_START))]


def _is_of_each_rank(name: str) -> bool:
    return name in _OF_EACH_RANK or name.startswith(_PREFIX_OF_EACH_RANK)
