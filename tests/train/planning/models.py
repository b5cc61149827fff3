"""ModelFacts about models that were never built."""

from __future__ import annotations

from collections.abc import Sequence

from monarch_kernel.train.planning.model_facts import ModelFacts, ModuleFacts, ParamFacts, above

__all__ = ["gpt", "param"]

MIB = 1 << 20


def param(name: str, *shape: int, **more: object) -> ParamFacts:
    """A parameter that only its owner uses."""
    names = (name, *more.pop("tied", ()))  # type: ignore[misc]
    more.setdefault("uses", (frozenset(above(name.rpartition(".")[0])),))
    return ParamFacts(names, shape, **more)  # type: ignore[arg-type]


def gpt(layers: int = 4, width: int = 64, vocabulary: int = 256, extra: Sequence[ParamFacts] = ()) -> ModelFacts:
    """A GPT: ``embed``, ``blocks.0`` and so on, ``norm``, ``head``; 1 MiB of activations a block."""
    modules = [ModuleFacts("", "GPT", calls=1, activation_nbytes=(layers + 1) * MIB)]
    params = [param("embed.weight", vocabulary, width)]
    modules += [ModuleFacts("embed", "Embedding", calls=1), ModuleFacts("blocks", "ModuleList", False)]
    for i in range(layers):
        block = f"blocks.{i}"
        modules.append(ModuleFacts(block, "Block", calls=1, activation_nbytes=MIB, input_nbytes=MIB // 32))
        modules += [ModuleFacts(f"{block}.{name}", "Linear", calls=1) for name in ("up", "down")]
        params += [param(f"{block}.up.weight", 4 * width, width), param(f"{block}.down.weight", width, 4 * width)]
    modules += [ModuleFacts("norm", "LayerNorm", calls=1), ModuleFacts("head", "Linear", calls=1)]
    params += [param("norm.weight", width), param("head.weight", vocabulary, width), *extra]
    return ModelFacts(tuple(params), {module.name: module for module in modules}, probed="fake", flops=10**9)
