"""Finds and checks the modules that the user wants to split along the axis for tensor parallelism.

Source: Shoeybi et al., "Megatron-LM", 2019. A layer split *colwise* computes some of its outputs on each rank, and a layer
split *rowwise* takes these, and sums the results of the ranks: each such pair needs one all-reduce in the forward, and one in
the backward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from monarch_kernel.errors import PlanError
from monarch_kernel.train.planning.model_facts import ModelFacts

__all__ = ["STYLES", "has_partner", "matched"]

STYLES = ("colwise", "rowwise")
_KINDS = ("Linear", "Embedding")


def matched(facts: ModelFacts, tensor: Mapping[str, str], parts: int) -> dict[str, str]:
    """Match patterns to modules: full name of a module to split -> style.

    Args:
        facts: facts about the model.
        tensor: pattern of full names -> style, such as ``{"blocks.*.attn.qkv": "colwise"}``; the last match decides.
        parts: number of ranks that split each module.

    Raises:
        PlanError: a pattern matches no module, a style is invalid, or a module can't be split this way.
    """
    found: dict[str, str] = {}
    for pattern, style in tensor.items():
        if style not in STYLES:
            raise PlanError(f"tensor: {style!r} of {pattern!r} must be one of {', '.join(STYLES)}")
        parsed = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
        names = [name for name in facts.modules if name and parsed.fullmatch(name)]
        if not names:
            raise PlanError(
                f"tensor: no module matches {pattern!r}; * stands for one part of a name, as in blocks.*.up"
            )
        for name in names:
            _check(facts, name, style, parts)
            found[name] = style
    return found


def has_partner(name: str, linears: Mapping[str, str]) -> bool:
    """Whether a linear layer beside this one is split the other way; else its input or output is whole on each rank.

    Args:
        name: full name of a linear layer.
        linears: full name of a split linear layer -> style.
    """
    beside = name.rpartition(".")[0]
    return any(style != linears[name] and other.rpartition(".")[0] == beside for other, style in linears.items())


def _check(facts: ModelFacts, name: str, style: str, parts: int) -> None:
    kind = facts.modules[name].kind
    if kind not in _KINDS:
        raise PlanError(f"tensor: {name} is a {kind}; only {' and '.join(_KINDS)} can be split: name those within it")
    weight = next((param for param in facts.params if f"{name}.weight" in param.names), None)
    if weight is None:
        raise PlanError(f"tensor: {name} owns no weight")
    if len(weight.names) > 1:
        raise PlanError(
            f"tensor: {weight.name} is shared ({', '.join(weight.names)}), so it can't be split for only one of these"
        )
    # The weight of a Linear is (outputs, inputs), that of an Embedding (rows, columns).
    dim = (0 if style == "colwise" else 1) if kind == "Linear" else (1 if style == "colwise" else 0)
    if weight.shape[dim] % parts:
        raise PlanError(
            f"tensor: {weight.name} of shape {list(weight.shape)} can't be split {style} among {parts} ranks: "
            f"{weight.shape[dim]} is not a multiple of {parts}"
        )
