"""What has to be known of a model to plan for it: plain data, found by looking at it and by one forward of an example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

__all__ = ["Facts", "ModuleFacts", "Needs", "ParamFacts", "above", "is_within"]


@dataclass(frozen=True)
class Needs:
    """What a layer says of itself, as the attribute ``parallel_needs`` of its class or of one module.

    Attributes:
        replicate: parameters, by their names within the module, that every rank is to hold whole.
        together: whether nothing in it may be wrapped by itself, since its parts use each other's parameters.
        why: the reason, which `Plan.explain` repeats.
    """

    replicate: Sequence[str] = ()
    together: bool = False
    why: str = "the layer asks for it"


@dataclass(frozen=True)
class ParamFacts:
    """One parameter, however many names it has.

    Attributes:
        names: its full names; of a tied one there are several.
        shape: of the whole.
        dtype: as ``float32``.
        itemsize: bytes an element.
        trains: whether it has a gradient.
        uses: for each use that was seen, the full names of all modules whose forward was running; None if nobody looked.
        has_sparse_gradient: as that of ``nn.Embedding(sparse=True)``.
        is_written: whether a forward writes to it.
        viewed_by: full name of an attribute that was made of it before, and shares its memory; empty if there is none.
        is_strided: whether its elements do not lie one after the other.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str = "float32"
    itemsize: int = 4
    trains: bool = True
    uses: tuple[frozenset[str], ...] | None = None
    has_sparse_gradient: bool = False
    is_written: bool = False
    viewed_by: str = ""
    is_strided: bool = False

    @property
    def name(self) -> str:
        """The first of its full names."""
        return self.names[0]

    @property
    def owners(self) -> tuple[str, ...]:
        """Full names of the modules that have it."""
        return tuple(name.rpartition(".")[0] for name in self.names)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """What the whole of it takes."""
        return self.numel * self.itemsize

    @property
    def is_unused(self) -> bool:
        """Whether no forward has used it, as far as somebody looked."""
        return self.uses is not None and not self.uses


@dataclass(frozen=True)
class ModuleFacts:
    """One module.

    Attributes:
        name: full name; that of the model itself is empty.
        kind: its class.
        has_forward: whether it can be called, which a ``ModuleList`` can't.
        calls: how often its forward ran; None if nobody looked.
        activation_nbytes: what its forward kept for the backward, with all below it.
        input_nbytes: the tensors that it was given.
        needs: what it says of itself.
    """

    name: str
    kind: str
    has_forward: bool = True
    calls: int | None = None
    activation_nbytes: int = 0
    input_nbytes: int = 0
    needs: Needs | None = None


@dataclass(frozen=True)
class Facts:
    """A model.

    Attributes:
        params: each once.
        modules: by full name, each before those below it.
        probed: how it was tried: ``fake`` (without memory or arithmetic), ``real``, or empty if it was not.
        why_not: why it was not tried.
        flops: of one forward of the example; 0 if nobody looked.
        averaged: buffers that a training forward changes, such as statistics of a batch norm.
        optimizer_nbytes: what the optimizer keeps for each element of a parameter that trains.
    """

    params: tuple[ParamFacts, ...]
    modules: Mapping[str, ModuleFacts] = field(default_factory=dict)
    probed: str = ""
    why_not: str = ""
    flops: int = 0
    averaged: tuple[str, ...] = ()
    optimizer_nbytes: float = 8.0

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(param.numel for param in self.params)

    @property
    def activation_nbytes(self) -> int:
        """What one forward of the example keeps for the backward."""
        root = self.modules.get("")
        return root.activation_nbytes if root is not None else 0

    def below(self, module: str) -> Iterator[ParamFacts]:
        """The parameters that belong to a module, with all below it."""
        return (param for param in self.params if any(is_within(owner, module) for owner in param.owners))

    def children(self, module: str) -> list[ModuleFacts]:
        """The modules right below one."""
        return [each for each in self.modules.values() if each.name and each.name.rpartition(".")[0] == module]


def is_within(name: str, module: str) -> bool:
    """Whether a full name is that of a module, or of something below it."""
    return not module or name == module or name.startswith(f"{module}.")


def above(name: str) -> Iterator[str]:
    """The full names of a module and of all that it is in, up to the model's, which is empty."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
