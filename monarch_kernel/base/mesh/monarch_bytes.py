"""Reads values of PyTorch Monarch from their bytes: numbers of eight bytes, and sequences behind their length."""

from __future__ import annotations

__all__ = ["Reader"]

_NUMBER_NBYTES = 8


class Reader:
    """Reads numbers and texts from bytes, one after the other; bytes behind them are ignored."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def number(self) -> int:
        """Read a number.

        Raises:
            ValueError: the bytes end before.
        """
        return int.from_bytes(self._take(_NUMBER_NBYTES), "little")

    def numbers(self) -> list[int]:
        """Read numbers; the errors are those of `number`."""
        return [self.number() for _ in range(self._length())]

    def texts(self) -> list[str]:
        """Read texts.

        Raises:
            ValueError: the bytes end before, or are no text.
        """
        return [str(self._take(self.number()), "utf-8") for _ in range(self._length())]

    def _length(self) -> int:
        """Read the length of a sequence, of which each element has at least one number."""
        length = self.number()
        if length > len(self._data) // _NUMBER_NBYTES:
            raise ValueError(f"the bytes end before the end of a sequence of length {length}")
        return length

    def _take(self, nbytes: int) -> memoryview:
        if nbytes > len(self._data):
            raise ValueError(f"the bytes end {nbytes - len(self._data)} bytes before the end of the value")
        taken, self._data = self._data[:nbytes], self._data[nbytes:]
        return taken
