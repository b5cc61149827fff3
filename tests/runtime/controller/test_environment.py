"""Ranks on this machine get what the program has changed in its environment since the host agent was started."""

from __future__ import annotations

import pytest

from monarch_kernel.runtime.controller.environment import MAX_NBYTES, Changes, changes, read_at_start

NONE = Changes({}, (), ())
BEFORE = {"HOME": "/home/ada", "PATH": "/bin", "OLD": "1"}


def test_what_was_set_or_removed_since_is_a_change() -> None:
    now = {"HOME": "/home/ada", "PATH": "/opt/mine:/bin", "HF_HOME": "/data/hf", "EMPTY": ""}
    assert changes(BEFORE, now) == Changes({"EMPTY": "", "HF_HOME": "/data/hf", "PATH": "/opt/mine:/bin"}, ("OLD",), ())
    assert changes(BEFORE, dict(BEFORE)) == NONE


@pytest.mark.parametrize(
    "name", ["RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID", "MONARCH_AGENT"]
)
def test_what_each_rank_gets_from_the_product_is_not_passed_on(name: str) -> None:
    assert changes({}, {name: "7"}) == NONE
    assert changes({name: "7"}, {}) == NONE


def test_what_can_not_be_sent_is_named_and_the_rest_is_sent() -> None:
    now = {"BYTES": "caf\udce9", "LONG": "x" * MAX_NBYTES, "HALF": "x" * (MAX_NBYTES // 2), "SHORT": "é"}
    found = changes({}, now)
    assert found.left_out == ("BYTES", "LONG")
    assert set(found.values) == {"HALF", "SHORT"}


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "MALLOC_ARENA_MAX",
        "PYTHONHASHSEED",
        "OMP_PROC_BIND",
        "MKL_NUM_THREADS",
        "TORCH_LOGS",
    ],
)
def test_variables_that_a_fork_does_not_read_again_are_known(name: str) -> None:
    assert read_at_start(["HF_HOME", name]) == [name]


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PATH", "PYTHONPATH", "TORCH_HOME", "NCCL_DEBUG", "TZ", "TMPDIR"])
def test_other_variables_take_effect_in_forks(name: str) -> None:
    assert read_at_start([name]) == []
