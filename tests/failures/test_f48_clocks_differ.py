"""F48: clocks of two hosts differ by minutes; the host is used, and a line says by how much its clock is off."""

from __future__ import annotations

from monarch_kernel.net.wire.messages import Software
from monarch_kernel.runtime.controller.host_compatibility import Clock, compare

HERE = Software("3.11.4", "/p", {"monarch_kernel": "0.1.0", "torch": "2.9.0", "cloudpickle": "3.1.0"})


def test_a_host_with_another_time_is_used_and_named() -> None:
    clock = Clock.read(sent_s := 1000.0, sent_s - 180.0, sent_s + 0.02)
    found = compare(HERE, [("node3", HERE, clock)])
    assert found.table == ()
    assert found.warnings == ("the clock of node3 is 180.0 s behind this machine's",)
