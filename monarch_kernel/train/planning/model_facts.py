"""The facts about a model that planning needs: plain data from a scan of the model and one forward of an example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

__all__ = ["ModelFacts", "ModuleFacts", "Needs", "ParamFacts", "above", "is_within"]


@dataclass(frozen=True)
class Needs:
    """The requirements of a layer, in the attribute ``parallel_needs`` of its class or of a module.

    Attributes:
        replicate: names, within the module, of parameters that every rank holds whole.
        together: whether no part of it may be wrapped separately, because its parts use each other's parameters.
        why: the reason, which `Plan.explain` repeats.
    """

    replicate: Sequence[str] = ()
    together: bool = False
    why: str = "the layer requires it"


@dataclass(frozen=True)
class ParamFacts:
    """One parameter, however many names it has.

    Attributes:
        names: its full names; a tied parameter has several.
        shape: shape of the whole parameter.
        dtype: name of the dtype, such as ``float32``.
        itemsize: bytes per element.
        trains: whether it has a gradient.
        uses: for each use in the probe, the full names of all modules whose forward was running; None without a probe.
        has_sparse_gradient: whether its gradient is sparse, as that of ``nn.Embedding(sparse=True)``.
        is_written: whether a forward writes to it.
        viewed_by: full name of an existing attribute that is a view of it, and shares its memory; empty if there is none.
        is_strided: whether it is not contiguous.
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
        """Full names of the modules that own it."""
        return tuple(name.rpartition(".")[0] for name in self.names)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.numel * self.itemsize

    @property
    def is_unused(self) -> bool:
        """Whether the probe found no use of it; False without a probe."""
        return self.uses is not None and not self.uses


@dataclass(frozen=True)
class ModuleFacts:
    """One module.

    Attributes:
        name: full name; empty for the model itself.
        kind: name of its class.
        has_forward: whether it can be called, unlike a ``ModuleList``.
        calls: how often its forward ran in the probe; None without a probe.
        activation_nbytes: bytes that its forward saved for the backward, including submodules.
        input_nbytes: bytes of its input tensors.
        needs: its requirements, if it declares any.
    """

    name: str
    kind: str
    has_forward: bool = True
    calls: int | None = None
    activation_nbytes: int = 0
    input_nbytes: int = 0
    needs: Needs | None = None


@dataclass(frozen=True)
class ModelFacts:
    """A model.

    Attributes:
        params: the parameters, each once.
        modules: by full name, each before its submodules.
        probed: how it was probed: ``fake`` (without memory or arithmetic), ``real``, or empty if it was not.
        why_not: why it was not probed.
        flops: floating-point operations of one forward of the example; 0 if unknown.
        averaged: buffers that a training forward changes, such as batch norm statistics.
        optimizer_nbytes: bytes of optimizer state per trainable element.
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
        """The number of elements of all parameters."""
        return sum(param.numel for param in self.params)

    @property
    def activation_nbytes(self) -> int:
        """Bytes that one forward of the example saves for the backward."""
        root = self.modules.get("")
        return root.activation_nbytes if root is not None else 0

    def below(self, module: str) -> Iterator[ParamFacts]:
        """The parameters of a module and its submodules."""
        return (param for param in self.params if any(is_within(owner, module) for owner in param.owners))

    def children(self, module: str) -> list[ModuleFacts]:
        """The direct submodules of a module."""
        return [each for each in self.modules.values() if each.name and each.name.rpartition(".")[0] == module]


def is_within(name: str, module: str) -> bool:
    """Whether a full name is that of a module, or of an object in it."""
    return not module or name == module or name.startswith(f"{module}.")


def above(name: str) -> Iterator[str]:
    """The full names of a module and of all modules that contain it, up to the empty name of the model."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
