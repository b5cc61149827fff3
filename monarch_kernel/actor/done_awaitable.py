"""The result of a method that PyTorch Monarch has as a coroutine, and that is done at once here."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, NoReturn

__all__ = ["DoneAwaitable"]


class DoneAwaitable(Coroutine[Any, Any, None]):
    """Can be awaited, passed to ``asyncio.run`` as Monarch's examples do, read with ``get()``, or left alone."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield

    def send(self, value: Any) -> NoReturn:
        """End as a coroutine does."""
        raise StopIteration

    def throw(self, *error: Any) -> NoReturn:
        """Raise the error, since there is no code that could handle it."""
        raise error[1] if len(error) > 1 and error[1] is not None else error[0]

    def close(self) -> None:
        """Do nothing."""

    def get(self, timeout: float | None = None) -> None:
        """Return None, as a future would."""
