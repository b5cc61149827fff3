"""A rank that lacks a module of the user asks the controller, which sends the source from its files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import monarch_kernel.features.editing.controller  # noqa: F401  # registers itself
from monarch_kernel.net.wire.messages import Fetch, Fetched, Message
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.testing import FakeLauncher, FakeRank, MemoryHub, add_host, rank_spec
from tests.support.waiting import wait_until


def test_the_source_of_a_module_is_sent_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wanted_by_ranks.py").write_text("raise RuntimeError")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    hub = MemoryHub()
    runtime = Runtime(hub.connect(), token="t")
    try:
        runtime.start_ranks(add_host(runtime, FakeLauncher()), [rank_spec(1)])
        rank = FakeRank(hub, 1, token="t")
        rank.hello()
        found: list[Message] = []
        for turn, name in enumerate(["wanted_by_ranks", "not_there", "json"], 1):
            rank.send(Fetch(turn, name))

            def is_answered(turn: int = turn) -> bool:
                found.extend(message for message in rank.receive() if isinstance(message, Fetched))
                return len(found) >= turn

            wait_until(is_answered, f"an answer about {name}")
    finally:
        runtime.close()
    first, *others = found
    assert isinstance(first, Fetched)
    assert first.module is not None
    assert (first.module.name, first.module.text) == ("wanted_by_ranks", "raise RuntimeError")
    assert others == [Fetched(2, None), Fetched(3, None)]
    assert "wanted_by_ranks" not in sys.modules
