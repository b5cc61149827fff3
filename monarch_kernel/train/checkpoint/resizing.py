"""What happens to state that differs by rank when another number of ranks loads a checkpoint.

Positions in data that `Sampler` has dealt are dealt again, so that each sample of the epoch comes once. Nothing else can be
divided among other ranks: to give the state of one rank to two would make their random numbers or their samples equal. So it is
refused, unless the program asks for new seeds (``on_resize="reseed"``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils import data

from monarch_kernel.errors import CheckpointError
from monarch_kernel.train.checkpoint.atomic_directory import Contents
from monarch_kernel.train.checkpoint.sampler import dealt_again, is_dealt
from monarch_kernel.train.generators import derived_seed

__all__ = ["ON_RESIZE", "Loaded", "Resize"]

ON_RESIZE = ("refuse", "reseed")
_OF_DATA = (data.DataLoader, data.Dataset, data.Sampler)
_OF_DATA_MODULES = {"datasets", "torchdata"}


class Loaded(dict[str, Any]):
    """The plain values of a checkpoint; explains why those of other ranks are absent."""

    def __init__(self, values: Mapping[str, Any], contents: Contents, ranks: int) -> None:
        super().__init__(values)
        self.contents = contents
        self._ranks = ranks

    def __missing__(self, name: str) -> Any:
        contents = self.contents
        if name not in contents.by_rank:
            raise KeyError(name)
        raise CheckpointError(
            f"{name} of {contents.path} differs by rank: it was saved by {_ranks(contents.ranks)}, and "
            f"{_ranks(self._ranks)} can't share the values. Load it with as many ranks"
        )


@dataclass(frozen=True)
class Resize:
    """A load by another number of ranks than those that saved.

    Attributes:
        contents: contents of the checkpoint.
        rank: this rank.
        ranks: the number of ranks that load.
        on_resize: what to do with state that can't be divided: ``refuse`` or ``reseed``.
    """

    contents: Contents
    rank: int
    ranks: int
    on_resize: str

    def states(
        self, things: Mapping[str, Any], shared: Mapping[str, Any], by_rank: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, Any], list[str]]:
        """Find the states that the objects of this rank get.

        Args:
            things: the objects with ``load_state_dict()``, by name.
            shared: values that the checkpoint stores once.
            by_rank: values of each rank that saved.

        Returns:
            The states, by name; and the names of objects that get none, because ``on_resize`` is ``reseed``.

        Raises:
            CheckpointError: a state can't be divided; the message lists them and the reasons.
        """
        found: dict[str, Any] = {}
        stay: list[str] = []
        refused: list[str] = []
        for name, thing in things.items():
            if name in self.contents.by_rank:
                each = [values[name] for values in by_rank]
                again = dealt_again(each)
                if isinstance(again, str):
                    refused.append(f"  {name}: {again}")
                else:
                    found[name] = again
            elif _is_of_data(thing) and not is_dealt(shared[name]):
                refused.append(
                    f"  {name}: a {type(thing).__name__} counts what one rank has read; with checkpoint.Sampler as its "
                    "sampler it can be divided"
                )
            else:
                found[name] = shared[name]
            if name not in found:
                stay.append(name)
        if refused and self.on_resize != "reseed":
            listed = "\n".join(refused)
            raise CheckpointError(
                f"{self.contents.path} was saved by {_ranks(self.contents.ranks)}, and can't be loaded by "
                f"{_ranks(self.ranks)}, because they can't share these states; nothing has changed\n{listed}\n"
                'Load it with as many ranks; or use checkpoint.load(..., on_resize="reseed"): generators get new seeds, and '
                "other objects stay as the program has created them"
            )
        return found, stay

    def reseed(self, name: str, thing: Any, by_rank: Sequence[Mapping[str, Any]]) -> None:
        """Give a new seed to an object that gets no state, if it is a generator."""
        if self._gets_seed(name, thing):
            thing.reseed(derived_seed(by_rank[0][name], self.rank))

    def said(self, things: Mapping[str, Any]) -> str:
        """A line that says which objects did not get their state."""
        reseeded = [name for name, thing in things.items() if self._gets_seed(name, thing)]
        others = [name for name in things if name not in reseeded]
        said = [f"new seeds for {', '.join(reseeded)}"] * bool(reseeded)
        said += [f"not loaded: {', '.join(others)}"] * bool(others)
        return (
            f"{self.contents.path.name} was saved by {_ranks(self.contents.ranks)} and loaded by {self.ranks}: "
            f"{'; '.join(said)}"
        )

    def _gets_seed(self, name: str, thing: Any) -> bool:
        return hasattr(thing, "reseed") and name in self.contents.by_rank


def _is_of_data(thing: Any) -> bool:
    """Whether an object gives a rank its part of the data, so that its state depends on the number of ranks."""
    return isinstance(thing, _OF_DATA) or type(thing).__module__.partition(".")[0] in _OF_DATA_MODULES


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"
