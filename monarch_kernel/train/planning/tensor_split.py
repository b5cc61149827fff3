"""Which modules are split along the axis for tensor parallelism, as the user names them.

Source: Shoeybi et al., "Megatron-LM", 2019. A layer split *colwise* gives each rank some of its outputs, and one split
*rowwise* takes those, and adds up what the ranks have: one all-reduce in the forward for each such pair, one in the backward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from monarch_kernel.errors import PlanError
from monarch_kernel.train.planning.facts import Facts

__all__ = ["STYLES", "has_partner", "matched"]

STYLES = ("colwise", "rowwise")
_KINDS = ("Linear", "Embedding")


def matched(facts: Facts, tensor: Mapping[str, str], parts: int) -> dict[str, str]:
    """Full names of the modules that are split -> how.

    Args:
        facts: of the model.
        tensor: patterns of full names -> style, as ``{"blocks.*.attn.qkv": "colwise"}``; the last that fits a name decides.
        parts: among how many ranks each is split.

    Raises:
        PlanError: a pattern fits nothing, a style is none, or a module can't be split so.
    """
    found: dict[str, str] = {}
    for pattern, style in tensor.items():
        if style not in STYLES:
            raise PlanError(f"tensor: {style!r} of {pattern!r} is none of {', '.join(STYLES)}")
        parsed = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
        names = [name for name in facts.modules if name and parsed.fullmatch(name)]
        if not names:
            raise PlanError(
                f"tensor: no module is called {pattern!r}; * stands for one part of a name, as in blocks.*.up"
            )
        for name in names:
            _check(facts, name, style, parts)
            found[name] = style
    return found


def has_partner(name: str, linears: Mapping[str, str]) -> bool:
    """Whether a linear layer beside this one is split the other way; else what it takes or gives is whole on each rank.

    Args:
        name: of a linear layer.
        linears: all that are split -> how.
    """
    beside = name.rpartition(".")[0]
    return any(style != linears[name] and other.rpartition(".")[0] == beside for other, style in linears.items())


def _check(facts: Facts, name: str, style: str, parts: int) -> None:
    kind = facts.modules[name].kind
    if kind not in _KINDS:
        raise PlanError(
            f"tensor: {name} is a {kind}; what can be split is {' and '.join(_KINDS)}: name those within it"
        )
    weight = next((param for param in facts.params if f"{name}.weight" in param.names), None)
    if weight is None:
        raise PlanError(f"tensor: {name} has no weight of its own")
    if len(weight.names) > 1:
        raise PlanError(
            f"tensor: {weight.name} is shared ({', '.join(weight.names)}), and can't be split for one of these"
        )
    # The weight of a Linear is (outputs, inputs), that of an Embedding (rows, columns).
    dim = (0 if style == "colwise" else 1) if kind == "Linear" else (1 if style == "colwise" else 0)
    if weight.shape[dim] % parts:
        raise PlanError(
            f"tensor: {weight.name} of shape {list(weight.shape)} can't be split {style} among {parts} ranks: "
            f"{weight.shape[dim]} is no multiple of {parts}"
        )
