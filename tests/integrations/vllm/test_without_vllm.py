"""What a user meets first: the package is not installed, or a mesh that can't have an engine."""

from __future__ import annotations

import pytest

from monarch_kernel.actor import ProcMesh
from monarch_kernel.errors import ActorError
from monarch_kernel.integrations.vllm import Generator
from tests.integrations.vllm.engines import HAS_VLLM
from tests.support.waiting import LONG_S

PROCS = {"gpus": 1}


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed here")
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(procs: ProcMesh) -> None:
    with pytest.raises(ActorError, match=r"vLLM is not installed in .*: pip install 'monarch_kernel\[vllm\]' for GPUs"):
        procs.spawn("generator", Generator, "org/model").initialized.get(LONG_S)


def test_arguments_without_a_meaning_are_refused_before_anything_starts(procs: ProcMesh) -> None:
    with pytest.raises(ActorError, match="one engine in one rank, so tensor_parallel_size must be 1"):
        procs.spawn("generator", Generator, "org/model", tensor_parallel_size=2).initialized.get(LONG_S)
