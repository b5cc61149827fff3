"""F20: versions of Python or torch differ between hosts; a table names them before anything runs."""

from __future__ import annotations

from monarch_kernel.net.wire.messages import Software
from monarch_kernel.runtime.controller.host_compatibility import compare


def software(python: str, torch: str) -> Software:
    return Software(python, "/usr/bin/python3", {"monarch_kernel": "0.1.0", "torch": torch, "cloudpickle": "3.1.0"})


def test_the_table_names_what_differs_by_host() -> None:
    here, other = software("3.11.4", "2.9.0"), software("3.12.1", "2.8.0")
    found = compare(here, [("node1", here, None), ("node2", other, None)])
    table = "\n".join(found.table)
    assert "host" in table
    assert "Python" in table
    assert "torch" in table
    assert [line.split()[-2:] for line in found.table[2:]] == [["3.11.4", "2.9.0"], ["3.12.1", "2.8.0"]]
