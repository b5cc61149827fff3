"""Tests the texts about hosts."""

from __future__ import annotations

from monarch_kernel.base.events import HostsView, HostView
from monarch_kernel.errors import Failure
from monarch_kernel.notebook.view.hosts import coming_text, missing_ranks_text, missing_text, up_text

UP = HostView(1, "n1", "up")
COMING = HostView(2, "", "starting")
LATE = HostView(3, "", "lost", "did not come up within 60 s")


def refused(number: int, *log: str) -> HostView:
    return HostView(number, "", "lost", "connection refused", log)


def test_a_wait_for_hosts_is_one_line_with_the_message_of_the_engine() -> None:
    view = HostsView("slurm", (UP, UP, COMING, COMING), "Slurm: Resources")
    assert coming_text("t", view, 12.0) == "t: 2 of 4 hosts up; waiting for Slurm: Resources (12 s)"
    assert coming_text("t", HostsView("ray", (COMING,)), 1.0) == "t: 0 of 1 host up; waiting for Ray (1.0 s)"
    assert coming_text("t", HostsView("own", (COMING,)), 1.0) == "t: 0 of 1 host up; waiting for own (1.0 s)"
    assert up_text("t", HostsView("ray", (UP,)), 12.0, "new host") == "t: 1 of 1 new host up, after 12 s"


def test_missing_hosts_are_listed_by_reason_with_their_logs() -> None:
    view = HostsView("ssh", (UP, refused(2, "unknown key"), refused(3, "unknown key"), LATE))
    assert missing_text("t", view, ("a", "b", "c", "d"), 60.0) == (
        "t: 3 of 4 hosts did not come up, after 1 min 00 s; all were released\n"
        "  b, c: connection refused\n"
        "    | unknown key\n"
        "  d: did not come up within 60 s"
    )


def test_hosts_without_names_are_numbered() -> None:
    view = HostsView("slurm", (UP, LATE, LATE, COMING))
    assert missing_text("t", view, (), 60.0, said="Slurm: Resources").splitlines() == [
        "t: 3 of 4 hosts did not come up, after 1 min 00 s (waiting for Slurm: Resources); all were released",
        "  hosts [1-2]: did not come up within 60 s",
        "  host 3: is not up",
    ]


def test_missing_ranks_are_listed_by_reason() -> None:
    killed = Failure("lost", "HostDied", "the host agent (pid 7) was killed by SIGKILL")
    ended = Failure("exception", "ValueError", "no", last_lines=("why",))
    assert missing_ranks_text("t", 6, {4: killed, 5: killed, 1: ended}, 1.25).splitlines() == [
        "t: 3 of 6 ranks did not come up, after 1.2 s; all were stopped",
        "  rank 1: no",
        "    | why",
        "  ranks [4-5]: the host agent (pid 7) was killed by SIGKILL",
    ]


def test_a_host_that_the_reason_names_is_not_named_twice() -> None:
    view = HostsView("ssh", (HostView(1, "", "lost", "a (me@a, port 22, from vm): connection refused"),))
    assert missing_text("t", view, ("a",), 1.0).splitlines()[1] == "  a (me@a, port 22, from vm): connection refused"


def test_a_long_list_of_missing_hosts_is_cut() -> None:
    hosts = tuple(HostView(i, "", "lost", f"reason {i}", ("line",) * 20) for i in range(100))
    lines = missing_text("t", HostsView("ssh", hosts), (), 1.0).splitlines()
    assert len(lines) == 1 + 8 * 9 + 1
    assert lines[-1] == "  and 92 more"
    same = tuple(HostView(i, "", "lost", "no route") for i in range(100))
    names = tuple(f"n{i}" for i in range(100))
    assert missing_text("t", HostsView("ssh", same), names, 1.0).splitlines()[1:] == ["  hosts [0-99]: no route"]
