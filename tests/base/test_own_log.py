"""Exceptions that end threads: those of the user are shown without the package's frames."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_kernel.base.own_log import take_log
from monarch_kernel.errors import format_ranks

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(autouse=True)
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    give_back = take_log(logging.NullHandler())
    yield
    give_back()


def text_of(target: Any, capsys: pytest.CaptureFixture[str]) -> str:
    thread = threading.Thread(target=target, name="mine")
    thread.start()
    thread.join()
    return capsys.readouterr().err


def test_the_traceback_of_a_users_thread_has_no_frame_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    def mine() -> None:
        format_ranks(None)  # type: ignore[arg-type]

    text = text_of(mine, capsys)
    assert "in mine" in text
    assert "TypeError" in text
    assert "monarch_kernel/" not in text


def test_so_has_none_of_the_errors_that_it_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    def mine() -> None:
        try:
            format_ranks(None)  # type: ignore[arg-type]
        except TypeError as error:
            raise LookupError("the second") from error

    text = text_of(mine, capsys)
    assert text.count("in mine") == 2
    assert "the second" in text
    assert "monarch_kernel/" not in text


def test_a_thread_that_runs_only_the_package_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(threading.Event.wait, capsys)
    assert "TypeError" in text
    assert "mine" in text
