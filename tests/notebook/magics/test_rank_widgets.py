"""Messages of ranks can open comms for their own widgets, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import comm
import pytest
from comm.base_comm import BaseComm

from monarch_kernel.features.widgets.messages import CommSent
from monarch_kernel.notebook.magics import rank_widgets
from monarch_kernel.notebook.magics.rank_widgets import RankWidgets
from monarch_kernel.notebook.magics.viewers import TARGET

PROC, OTHER = 1, 2


class PageComm(BaseComm):
    """A comm that records what it sends to the page."""

    sent: ClassVar[list[tuple[str, str, Any]]] = []

    def __del__(self) -> None:
        """Send nothing at the end: by then, another test runs."""

    def publish_msg(self, msg_type: str, data: Any = None, *args: Any, **keys: Any) -> None:
        self.sent.append((msg_type, self.comm_id, data))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, Any]]]:
    """What the page receives."""
    monkeypatch.setattr(comm, "create_comm", PageComm)
    manager = comm.base_comm.CommManager()
    monkeypatch.setattr(comm, "get_comm_manager", lambda: manager)
    PageComm.sent.clear()
    yield PageComm.sent
    PageComm.sent.clear()


@pytest.fixture
def widgets(sent: list[Any]) -> RankWidgets:
    runtime: Any = SimpleNamespace(request=lambda *args, **options: None)
    return RankWidgets(runtime)


def message(kind: str, id: str, data: dict[str, Any], target: str = "") -> CommSent:
    return CommSent(kind, id, data, {}, (), target)


def opened(id: str, target: str = "jupyter.widget") -> CommSent:
    return message("comm_open", id, {"state": {"value": 1}}, target)


def test_the_panel_and_comms_of_others_can_not_be_opened(widgets: RankWidgets, sent: list[Any]) -> None:
    widgets.comm_sent(PROC, opened("panel", TARGET))
    widgets.comm_sent(PROC, opened("a"))
    widgets.comm_sent(OTHER, opened("a"))
    assert [each[:2] for each in sent] == [("comm_open", "a")]
    widgets.comm_sent(OTHER, message("comm_msg", "a", {"method": "update", "state": {"value": 2}}))
    widgets.comm_sent(OTHER, message("comm_close", "a", {}))
    assert len(sent) == 1
    widgets.comm_sent(PROC, message("comm_close", "a", {}))
    assert sent[1:] == [("comm_close", "a", {})]


def test_the_number_of_comms_of_a_rank_is_bounded(
    widgets: RankWidgets, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_widgets, "MAX_COMMS", 2)
    for id in "abcd":
        widgets.comm_sent(PROC, opened(id))
    widgets.comm_sent(OTHER, opened("e"))
    assert [id for _, id, _ in sent] == ["a", "b", "e"]


@pytest.mark.parametrize(
    "broken",
    [
        message("comm_open", "b", {"state": 5}, "jupyter.widget"),
        message("comm_msg", "a", {"method": "update", "state": None}),
        message("comm_msg", "a", {"method": "update", "state": {}, "buffer_paths": [["x", "y"]]}),
        message("comm_msg", "nothing", {}),
        message("comm_what", "a", {}),
    ],
)
def test_a_broken_message_harms_nothing(widgets: RankWidgets, sent: list[Any], broken: CommSent) -> None:
    widgets.comm_sent(PROC, opened("a"))
    widgets.comm_sent(PROC, broken)
    widgets.comm_sent(PROC, message("comm_msg", "a", {"method": "update", "state": {"value": 3}}))
    assert sent[-1] == ("comm_msg", "a", {"method": "update", "state": {"value": 3}})


def test_the_comms_of_a_rank_that_has_ended_stay_in_the_page(
    widgets: RankWidgets, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_widgets, "MAX_COMMS", 2)
    for id in "ab":
        widgets.comm_sent(PROC, opened(id))
    widgets.rank_lost(PROC)
    widgets.comm_sent(OTHER, opened("c"))
    widgets.rank_lost(OTHER)
    assert [kind for kind, _, _ in sent] == ["comm_open"] * 3
    assert list(comm.get_comm_manager().comms) == ["b", "c"]  # a message to these is no error


def test_a_message_of_an_unknown_kind_is_dropped(widgets: RankWidgets, sent: list[Any]) -> None:
    widgets.comm_sent(PROC, opened("a"))
    widgets.comm_sent(PROC, message("execute_request", "a", {"code": "1"}))
    assert len(sent) == 1
