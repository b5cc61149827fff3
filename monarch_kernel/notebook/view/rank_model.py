"""The model of a widget that lives on a rank, among the models of this kernel: a page that is reloaded asks for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import traitlets
from comm.base_comm import BaseComm
from ipywidgets import Widget

__all__ = ["RankModel"]


class RankModel(Widget):  # type: ignore[misc]
    """The last known state of a widget of a rank; changes go past it, between its comm and the rank.

    Args:
        comm: the comm with the page, which is open.
        state: the state with which the rank has made the widget.
        on_close: called when this process closes the widget, as by ``Widget.close_all()``.
    """

    _model_name = traitlets.Unicode()
    _model_module = traitlets.Unicode()
    _model_module_version = traitlets.Unicode()

    def __init__(self, comm: BaseComm, state: Mapping[str, Any], on_close: Callable[[], object]) -> None:
        self._state = dict(state)
        self._on_close: Callable[[], object] | None = on_close
        names = ("_model_name", "_model_module", "_model_module_version")
        super().__init__(comm=comm, **{name: str(state.get(name, "")) for name in names})

    @traitlets.default("keys")
    def _default_keys(self) -> list[str]:
        return []  # nothing is sent from here

    def note(self, state: dict[str, Any], paths: Sequence[Sequence[Any]], buffers: Sequence[bytes]) -> None:
        """Note what parts of the state are now; it is kept.

        Args:
            state: name of a trait -> its value.
            paths: the place of each binary part, as keys and indices.
            buffers: the binary parts.
        """
        for path, buffer in zip(paths, buffers):
            place: Any = state
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = buffer
        self._state.update(state)

    @property
    def can_be_disabled(self) -> bool:
        """Whether it is a control that works."""
        return self._state.get("disabled") is False

    def get_state(self, key: object = None, drop_defaults: bool = False) -> dict[str, Any]:
        """Return the last known state."""
        return dict(self._state)

    def forget(self) -> None:
        """Remove it from the models of this kernel; its comm has been closed, or is handled elsewhere."""
        self._on_close = None
        super().close()

    def close(self) -> None:
        """Close the widget in the page and on the rank."""
        on_close, self._on_close = self._on_close, None
        super().close()
        if on_close is not None:
            on_close()

    def __repr__(self) -> str:
        return f"<{self._model_name} of a rank>"
