"""Tests the lines that complete texts of torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from monarch_kernel.runtime.diagnostics.torch_notes import torch_notes


def missing_ninja() -> RuntimeError:
    from torch.utils import cpp_extension

    with pytest.raises(RuntimeError) as raised:
        cpp_extension.verify_ninja_availability()
    return raised.value


def test_the_error_about_ninja_says_where_it_is_or_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    of_torch = missing_ninja()
    of_deepspeed = RuntimeError("Unable to JIT load the deepspeed_shm_comm op due to ninja not being installed.")
    for error in of_torch, of_deepspeed:
        assert torch_notes(error) == ("run `pip install ninja` with the Python of the ranks, and this cell again",)
    (tmp_path / "ninja").touch(mode=0o755)
    for error in of_torch, of_deepspeed:
        (note,) = torch_notes(error)
        assert note == (
            f"ninja is in {tmp_path}, which is not in PATH: "
            f'run os.environ["PATH"] += ":{tmp_path}" in a cell on the ranks'
        )
