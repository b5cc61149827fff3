"""Bars of ``tqdm.notebook`` on ranks: as text, so that the notebook merges those of all ranks into one bar."""

from __future__ import annotations

from types import ModuleType
from typing import Any

__all__ = ["use_text_bars"]


def use_text_bars(notebook: ModuleType) -> None:
    """Make the module ``tqdm.notebook`` draw bars as text.

    Args:
        notebook: the module, which has been imported.
    """
    standard: Any = notebook.std_tqdm

    class RankBar(standard):  # type: ignore[misc]
        """A bar of ``tqdm.notebook`` as text, on stderr. ``display=False`` and ``container`` have no meaning here."""

        def __init__(self, *args: Any, display: bool = True, **options: Any) -> None:
            super().__init__(*args, **options)

        def display(
            self,
            msg: str | None = None,
            pos: int | None = None,
            close: bool = False,
            bar_style: str | None = None,
            check_delay: bool = True,
        ) -> Any:
            return super().display(msg, pos)

    def bar_range(*args: Any, **options: Any) -> Any:
        return RankBar(range(*args), **options)

    vars(notebook).update(tqdm=RankBar, tqdm_notebook=RankBar, trange=bar_range, tnrange=bar_range)
