"""What tests of engines of vLLM share: when they run, how long an engine takes, and the process that has one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from monarch_kernel.actor import ProcMesh, this_host

__all__ = ["HAS_VLLM", "START_S", "WITH_ENGINE", "engine_mesh"]

HAS_VLLM = importlib.util.find_spec("vllm") is not None

START_S = 400.0
"""An engine imports gigabytes and starts in half a minute to two, by how busy the machine is."""

WITH_ENGINE = [
    pytest.mark.slow,
    pytest.mark.timeout(int(2 * START_S)),
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is in the environment of make test-vllm"),
]
"""The marks of a module whose tests have an engine."""


def engine_mesh() -> Iterator[ProcMesh]:
    """A process for an engine, which ends with the module; the body of a fixture."""
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    procs = this_host().spawn_procs({"gpus": 1}, name="generators", device="cpu", env=env)
    yield procs
    procs.stop().get(START_S)  # no effect if a test has stopped them
