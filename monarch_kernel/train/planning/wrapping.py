"""Chooses the modules that FSDP wraps separately, and the parameters that every rank holds whole.

Theory of operation
===================

FSDP gathers the parameters of a *unit*, a module that is wrapped separately, before its forward, and frees them after it. A
parameter belongs to the nearest unit that contains its owner. Code that uses the parameter while that unit's forward is not
running meets a shard of it: this causes an unspecific error, or wrong numbers without an error. The probe knows which modules
were running at each use of a parameter. A unit is *sound* for a parameter if it was running at each use, and, for a tied
parameter, is the nearest unit of all its owners. The model itself is the unit of all that is in no other unit.

There are two ways to repair a unit that is not sound for a parameter. If the parameter is a small part of its unit it is
*kept*: each rank holds it whole, and its gradients are averaged. Otherwise the unit is dissolved, and its parameters belong to
the next unit above. Each step keeps a parameter or dissolves a unit, so this ends; then every parameter is kept, or its unit is
sound for it.

Some parameters are kept regardless of their unit, because FSDP can't shard them, or because sharding would silently break code
that uses them: scalars, parameters with sparse gradients, with another dtype than the rest of the unit, with existing views, or
written to in a forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from monarch_kernel.errors import PlanError
from monarch_kernel.train.planning.model_facts import ModelFacts, ModuleFacts, ParamFacts, above, is_within

__all__ = ["SPARSE", "Wrapping", "blocks", "is_sound", "unit_of", "wrap"]

SPARSE = "its gradient is sparse"
"""A reason that keeps a parameter even if nothing is sharded."""

_SMALL = 0.1
"""Up to this fraction of its unit, a parameter is kept rather than its unit dissolved."""
_LARGE = 0.1
"""From this fraction of the model on, a module that is not a block is a unit, too."""


@dataclass(frozen=True)
class Wrapping:
    """The units and kept parameters of a model.

    Attributes:
        units: full names of units, each after the units in it; without the model itself, which always is a unit.
        kept: full name of a parameter -> why each rank holds it whole.
        notes: descriptions of exceptions from the rules.
    """

    units: tuple[str, ...]
    kept: Mapping[str, str]
    notes: tuple[str, ...] = ()


def blocks(facts: ModelFacts) -> list[str]:
    """The repeated blocks of a model: the outermost children of one class in a ``ModuleList`` or ``Sequential``."""
    found: list[str] = []
    for module in facts.modules.values():
        if any(is_within(module.name, block) for block in found):
            continue
        children = facts.children(module.name)
        kinds = {child.kind for child in children}
        is_list = module.kind in ("ModuleList", "ModuleDict", "Sequential") and len(children) > 1
        if is_list and len(kinds) == 1 and all(_may_be_unit(facts, child) for child in children):
            found += [child.name for child in children]
    return found


def wrap(facts: ModelFacts, units: Sequence[str] | None = None, replicate: Sequence[str] = ()) -> Wrapping:
    """Choose units and kept parameters.

    Args:
        facts: facts about the model.
        units: modules that the user requests as units; None: its blocks, and other large modules.
        replicate: parameters that the user wants to keep whole.

    Raises:
        PlanError: a name does not exist, or a named module can't be a unit.
    """
    kept = _asked_for(facts, replicate)
    notes: list[str] = []
    chosen = _found(facts) if units is None else _given(facts, units)
    for module in facts.modules.values():
        if module.needs is not None and module.needs.together:
            inner = [unit for unit in chosen if unit != module.name and is_within(unit, module.name)]
            if inner:
                chosen -= set(inner)
                notes.append(f"{module.name}: no part of it is wrapped separately ({module.needs.why})")
    for param in facts.params:
        if param.name not in kept and (why := _never_split(param)):
            kept[param.name] = why
    _keep_odd_dtypes(facts, chosen, kept)
    while (unsound := _first_unsound(facts, chosen, kept)) is not None:
        param, unit, why = unsound
        if not unit or param.nbytes <= _SMALL * sum(each.nbytes for each in facts.below(unit)):
            kept[param.name] = why
        else:
            chosen.discard(unit)
            notes.append(f"{unit} is not wrapped separately: {param.name} {why}")
            _keep_odd_dtypes(facts, chosen, kept)
    order = {name: at for at, name in enumerate(facts.modules)}
    return Wrapping(tuple(sorted(chosen, key=lambda unit: (-unit.count("."), order[unit]))), kept, tuple(notes))


def unit_of(owner: str, units: Sequence[str] | set[str]) -> str:
    """The nearest unit that contains a module; empty for the model itself."""
    return next(name for name in above(owner) if name in units or not name)


def is_sound(param: ParamFacts, units: Sequence[str] | set[str]) -> bool:
    """Whether all uses of a parameter are in the forward of the unit that it belongs to."""
    return not _why_unsound(param, units)


def _asked_for(facts: ModelFacts, replicate: Sequence[str]) -> dict[str, str]:
    by_name = {name: param.name for param in facts.params for name in param.names}
    kept: dict[str, str] = {}
    for name in replicate:
        if name not in by_name:
            raise PlanError(f"replicate: the model has no parameter {name!r}; {_near(name, by_name)}")
        kept[by_name[name]] = "you requested it"
    for module in facts.modules.values():
        for name in module.needs.replicate if module.needs is not None else ():
            full = f"{module.name}.{name}" if module.name else name
            if full not in by_name:
                raise PlanError(
                    f"parallel_needs of {module.name or 'the model'} names a parameter that it does not have: {name!r}"
                )
            assert module.needs is not None
            kept[by_name[full]] = module.needs.why
    return kept


def _near(name: str, known: Mapping[str, object]) -> str:
    last = name.rpartition(".")[2]
    near = [each for each in known if each.rpartition(".")[2] == last] or list(known)
    return f"there is {', '.join(near[:8])}{', …' if len(near) > 8 else ''}"


def _may_be_unit(facts: ModelFacts, module: ModuleFacts) -> bool:
    return module.has_forward and module.calls != 0 and next(facts.below(module.name), None) is not None


def _found(facts: ModelFacts) -> set[str]:
    chosen = set(blocks(facts))
    large = _LARGE * sum(param.nbytes for param in facts.params)
    for module in facts.children(""):
        has_blocks = any(is_within(block, module.name) for block in chosen)
        if not has_blocks and _may_be_unit(facts, module):
            own = list(facts.below(module.name))
            is_tied = any(not is_within(owner, module.name) for param in own for owner in param.owners)
            if chosen and not is_tied and sum(param.nbytes for param in own) >= large:
                chosen.add(module.name)
    return chosen


def _given(facts: ModelFacts, units: Sequence[str]) -> set[str]:
    for name in units:
        module = facts.modules.get(name)
        if module is None or not name:
            raise PlanError(f"units: the model has no module {name!r}; {_near(name, facts.modules)}")
        if not module.has_forward:
            children = ", ".join(child.name for child in facts.children(name)[:4])
            raise PlanError(f"units: {name} is a {module.kind}, which is never called; name its children: {children}")
        if next(facts.below(name), None) is None:
            raise PlanError(f"units: {name} has no parameters to shard; leave it out")
    return set(units)


def _never_split(param: ParamFacts) -> str:
    if not param.shape:
        return "it is a scalar"
    if param.has_sparse_gradient:
        return SPARSE
    if param.viewed_by:
        return f"{param.viewed_by} is an existing view of it"
    if param.is_written:
        return "a forward writes to it"
    return ""


def _keep_odd_dtypes(facts: ModelFacts, units: set[str], kept: dict[str, str]) -> None:
    """Keep parameters with another dtype than most of their unit: FSDP needs one dtype for its trainable parameters."""
    groups: dict[str, dict[str, list[ParamFacts]]] = defaultdict(lambda: defaultdict(list))
    for param in facts.params:
        if param.trains and param.name not in kept:
            groups[unit_of(param.owners[0], units)][param.dtype].append(param)
    for by_dtype in groups.values():
        sizes = {dtype: sum(param.nbytes for param in params) for dtype, params in by_dtype.items()}
        main = max(sizes, key=lambda dtype: sizes[dtype])
        for dtype, params in by_dtype.items():
            for param in params if dtype != main else ():
                kept[param.name] = f"it is {dtype}, and the rest of its unit {main}"


def _first_unsound(facts: ModelFacts, units: set[str], kept: Mapping[str, str]) -> tuple[ParamFacts, str, str] | None:
    for param in facts.params:
        if param.name in kept:
            continue
        for unit, why in _why_unsound(param, units):
            return param, unit, why
    return None


def _why_unsound(param: ParamFacts, units: Sequence[str] | set[str]) -> list[tuple[str, str]]:
    """The unit that is not sound for a parameter, with the reason; empty if it is sound."""
    return list(_unsound(param, units))


def _unsound(param: ParamFacts, units: Sequence[str] | set[str]) -> Iterator[tuple[str, str]]:
    mine = {unit_of(owner, units) for owner in param.owners}
    if len(mine) > 1:  # dissolve the deepest unit first
        yield (
            max(mine, key=lambda unit: (bool(unit), unit.count("."), unit)),
            f"is shared: {', '.join(param.names[:4])}",
        )
    unit = next(iter(mine))
    for use in param.uses or ():
        if unit not in use:
            deepest = max(use, key=lambda name: name.count(".") + bool(name), default="")
            where = deepest or ("the model's own forward" if use else "code outside of any forward")
            yield unit, f"is used in {where}, while {unit or 'the model'} is not running"
