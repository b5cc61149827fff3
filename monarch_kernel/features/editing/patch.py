"""Updates existing classes and functions in place to new versions.

Theory of operation
===================

To edit a class and evaluate it again creates a second class, to which nothing refers yet, while instances, derived classes,
bound methods and variables everywhere refer to the existing one. Not all of these references can be found, let alone changed
(tuples, weak references, references in native code). So the existing class stays the same object and takes over the members,
bases and documentation of the new one. The few references to the new class, in what was created together with it
(``__class__`` cells of methods that use ``super()``, variables, derived classes, instances), are found by the garbage collector
and redirected to the existing class. The collector does not visit what a rank has inherited from the zygote, which is frozen:
there this module searches the variables of modules, including those of cells. Functions that were methods, or are in a module,
take over the code of the new ones, too, so that a hook or a callback that refers to an old function runs the new code.

Instances keep their layout: an edit is refused if the new class needs another layout (``__slots__``, bases in native code,
fields of a named tuple).

`objections` finds what is impossible before anything changes; after it, `become` does not fail.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import CellType, FunctionType, GetSetDescriptorType, MappingProxyType, MemberDescriptorType, ModuleType
from typing import Any

__all__ = ["all_classes", "at_once", "become", "has_instances", "is_same_code", "objections", "refer_to"]

_OF_THE_LAYOUT = (MemberDescriptorType, GetSetDescriptorType)
_NOT_MEMBERS = frozenset({"__dict__", "__weakref__", "_abc_impl", "__slots__"})
_SWITCH_INTERVAL_S = 10.0
NOTHING: Mapping[type, type] = MappingProxyType({})


def all_classes() -> Iterator[type]:
    """Every class of this process, bases first. Code of a metaclass, such as ``__hash__``, may raise: do not run it."""
    seen = {id(object)}
    pending: list[type] = [object]
    while pending:
        found: list[type] = type.__subclasses__(pending.pop())
        for cls in found:
            if id(cls) not in seen:
                seen.add(id(cls))
                pending.append(cls)
                yield cls


def has_instances(classes: Iterable[type]) -> bool:
    """Whether there are objects of these classes, or of classes derived from them."""
    wanted = tuple(classes)
    return any(not issubclass(type(each), type) and issubclass(type(each), wanted) for each in gc.get_objects())


def objections(pairs: Mapping[type, type], aliases: Mapping[type, type] = NOTHING) -> dict[type, str]:
    """Find existing classes that can't take over their new version: class -> reason. Leaves all classes unchanged.

    Args:
        pairs: new class -> the existing one.
        aliases: further classes -> the classes that replace them.
    """
    stand_for = {**aliases, **pairs}
    found: dict[type, str] = {}
    undo: list[tuple[type, tuple[type, ...]]] = []
    try:
        for new, old in _bases_first(pairs):
            why = _objection(new, old, stand_for)
            if why:
                found[old] = why
                continue
            bases = _bases(new, stand_for)
            if bases == old.__bases__:
                continue
            before = old.__bases__
            try:  # only Python knows which layouts are compatible
                old.__bases__ = bases
            except TypeError as error:
                found[old] = f"its base classes have changed from {_names(before)} to {_names(bases)}: {error}"
            else:
                undo.append((old, before))
    finally:
        for old, before in reversed(undo):
            old.__bases__ = before
    return found


def become(
    pairs: Mapping[type, type],
    aliases: Mapping[type, type] = NOTHING,
    swaps: Sequence[tuple[object, object]] = (),
) -> None:
    """Update existing classes to their new versions.

    A running call continues with its old code; the functions that it calls next are new.

    Args:
        pairs: new class -> the existing one, without `objections`.
        aliases: further classes -> the classes that replace them in references.
        swaps: further objects, each with the object that replaces it in references.
    """
    stand_for = {**aliases, **pairs}
    with at_once():
        for new, old in _bases_first(pairs):
            bases = _bases(new, stand_for)
            if bases != old.__bases__:
                old.__bases__ = bases
            _take_members(new, old)
        refer_to(stand_for, swaps, (pairs, aliases))


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Make the body appear atomic to other threads; it must not wait."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def refer_to(
    pairs: Mapping[type, type], swaps: Iterable[tuple[object, object]] = (), but: Sequence[object] = ()
) -> None:
    """Redirect references in variables and containers from some objects to others.

    Args:
        pairs: class -> the class that replaces it in references.
        swaps: further objects, each with the object that replaces it.
        but: containers to leave unchanged; ``pairs`` and ``swaps`` stay unchanged, too.
    """
    instead = _Instead({id(old): (old, new) for old, new in (*pairs.items(), *swaps) if old is not new})
    if not instead:
        return
    spared = {id(pairs), id(swaps), *map(id, but), *map(id, instead.values())}
    holders = [holder for holder in gc.get_referrers(*instead.olds()) if id(holder) not in spared]
    if gc.get_freeze_count():
        holders += _modules_with(instead, {id(holder) for holder in holders})
    owners = _owners_of_dicts() if any(type(holder) is dict and "__doc__" in holder for holder in holders) else {}
    for holder in holders:
        owner = owners.get(id(holder))
        if owner is None:
            _refer_in(holder, instead)
            continue
        for name, value in vars(owner).copy().items():
            if instead.of(value) is not value:
                type.__setattr__(owner, name, instead.of(value))


def is_same_code(one: object, other: object) -> bool:
    """Whether two members of classes (functions, or wrappers of functions) have the same code."""
    ours, theirs = dict(_functions(one)), dict(_functions(other))
    if ours.keys() != theirs.keys() or not ours:
        return False
    return all(_same_function(ours[key], theirs[key]) for key in ours)


# -- objections


def _objection(new: type, old: type, pairs: Mapping[type, type]) -> str:
    kind = pairs.get(type(new), type(new))
    if kind is not type(old):
        return f"its metaclass has changed from {type(old).__name__} to {kind.__name__}"
    if issubclass(new, tuple) and getattr(new, "_fields", ()) != getattr(old, "_fields", ()):
        return (
            f"its fields have changed from {_format_names(old._fields)} to {_format_names(getattr(new, '_fields', ()))}"  # type: ignore[attr-defined]
        )
    if not old.__dictoffset__:
        extra = sorted(_slots(new) - _slots(old)) or (["__dict__"] if _has_dict(new) else [])
        if extra:
            return f"its instances have __slots__ and no place for {', '.join(extra)}"
    return ""


def _slots(cls: type) -> set[str]:
    """The declared slots of instances. A class that was pickled by value has no slots any more, but still declares them."""
    declared = (vars(base).get("__slots__", ()) for base in cls.__mro__)
    return {name for names in declared for name in ([names] if isinstance(names, str) else names)}


def _has_dict(cls: type) -> bool:
    return bool(cls.__dictoffset__) and not all("__slots__" in vars(base) for base in cls.__mro__[:-1])


def _format_names(names: Iterable[str]) -> str:
    return f"({', '.join(names)})"


def _names(classes: Iterable[type]) -> str:
    return _format_names(cls.__name__ for cls in classes)


# -- members


def _bases_first(pairs: Mapping[type, type]) -> list[tuple[type, type]]:
    return sorted(pairs.items(), key=lambda pair: len(pair[0].__mro__))


def _bases(new: type, pairs: Mapping[type, type]) -> tuple[type, ...]:
    return tuple(pairs.get(base, base) for base in new.__bases__)


def _take_members(new: type, old: type) -> None:
    theirs, ours = dict(vars(new)), dict(vars(old))
    for name, value in ours.items():
        if name not in theirs and name not in _NOT_MEMBERS and not isinstance(value, _OF_THE_LAYOUT):
            type.__delattr__(old, name)
    for name, value in theirs.items():
        if name in _NOT_MEMBERS or isinstance(value, _OF_THE_LAYOUT):
            continue
        type.__setattr__(old, name, _merged(ours[name], value) if name in ours else value)


def _merged(old: Any, new: Any) -> Any:
    """Merge an old and a new member of a class.

    The result keeps the old function objects where they can run the new code, because other code may refer to them: so the
    next edit reaches these references, too.
    """
    ours, theirs = dict(_functions(old)), dict(_functions(new))
    kept = {key: ours[key] for key in theirs if key in ours and update_function(ours[key], theirs[key])}
    if isinstance(new, (FunctionType, staticmethod, classmethod, property)):
        return old if type(old) is type(new) and 0 < len(kept) == len(ours) == len(theirs) else new
    if kept:
        vars(new).update(kept)
    return new


def update_function(old: FunctionType, new: FunctionType) -> bool:
    """Give an existing function the code of a new one; False, without a change, if that is impossible."""
    names = old.__code__.co_freevars
    if old is new or names != new.__code__.co_freevars or not _may_see_the_same(old, new):
        return old is new
    for name, ours, theirs in zip(names, old.__closure__ or (), new.__closure__ or ()):
        if name != "__class__" and ours is not theirs:
            _copy_cell(ours, theirs)
    old.__code__ = new.__code__
    old.__defaults__ = new.__defaults__
    old.__kwdefaults__ = new.__kwdefaults__
    old.__doc__ = new.__doc__
    old.__annotations__ = new.__annotations__
    old.__dict__.update(new.__dict__)
    return True


def _may_see_the_same(old: FunctionType, new: FunctionType) -> bool:
    """Whether the code of the new function finds its globals in those of the old one; adds missing ones if allowed."""
    ours, theirs = old.__globals__, new.__globals__
    if ours is theirs:
        return True
    module = sys.modules.get(ours.get("__name__", ""))
    if module is not None and vars(module) is ours:
        return False  # never overwrite variables of a module of this process
    ours.update(theirs)
    return True


def _copy_cell(ours: CellType, theirs: CellType) -> None:
    try:
        value = theirs.cell_contents
    except ValueError:  # an empty cell
        return
    try:
        before = ours.cell_contents
    except ValueError:
        before = None
    if isinstance(before, FunctionType) and isinstance(value, FunctionType):
        update_function(before, value)
    ours.cell_contents = value


def _functions(member: object) -> Iterator[tuple[str, FunctionType]]:
    """The functions of a class member: up to three of a property, and the attributes of what a decorator returned."""
    if isinstance(member, FunctionType):
        yield "", member
    elif isinstance(member, (staticmethod, classmethod)):
        yield from _functions(member.__func__)
    elif isinstance(member, property):
        for name in ("fget", "fset", "fdel"):
            if isinstance(function := getattr(member, name), FunctionType):
                yield name, function
    elif not isinstance(member, type):
        kept = getattr(member, "__dict__", {})
        yield from ((name, value) for name, value in kept.items() if isinstance(value, FunctionType))


def _same_function(one: FunctionType, other: FunctionType) -> bool:
    ours, theirs = one.__code__, other.__code__
    if (ours.co_code, ours.co_names, ours.co_varnames) != (theirs.co_code, theirs.co_names, theirs.co_varnames):
        return False
    plain = (one.__defaults__, one.__kwdefaults__), (other.__defaults__, other.__kwdefaults__)
    return repr(_constants(ours)) == repr(_constants(theirs)) and repr(plain[0]) == repr(plain[1])


def _constants(code: Any) -> list[Any]:
    return [
        (_constants(each), each.co_code, each.co_names) if hasattr(each, "co_code") else each for each in code.co_consts
    ]


# -- references


def _modules_with(instead: _Instead, but: Container[int]) -> Iterator[dict[str, Any]]:
    """The variables of modules that refer to an object to replace, except ``but``."""
    for module in list(sys.modules.values()):
        variables = vars(module) if isinstance(module, ModuleType) else {}
        if id(variables) not in but and any(id(value) in instead for value in variables.copy().values()):
            yield variables


def _owners_of_dicts() -> dict[int, type]:
    """The dictionaries of classes, by identity. To write to them directly bypasses Python's method caches."""
    return {id(gc.get_referents(type.__getattribute__(cls, "__dict__"))[0]): cls for cls in all_classes()}


class _Instead(dict[int, tuple[object, object]]):
    """Replacements of objects, by identity, because members of two Enums may be equal."""

    def olds(self) -> list[object]:
        return [old for old, _ in self.values()]

    def of(self, value: Any) -> Any:
        found = self.get(id(value))
        return value if found is None else found[1]


def _refer_in(holder: Any, instead: _Instead) -> None:
    if isinstance(holder, CellType):
        holder.cell_contents = instead.of(holder.cell_contents)
    elif isinstance(holder, dict):
        _refer_in_dict(holder, instead)
    elif type(holder) is list:
        holder[:] = [instead.of(value) for value in holder]
    elif type(holder) is set:
        for value in [value for value in holder if instead.of(value) is not value]:
            holder.discard(value)
            holder.add(instead.of(value))
    elif isinstance(holder, type):
        bases = tuple(instead.of(base) for base in holder.__bases__)
        if id(holder) not in instead and any(one is not other for one, other in zip(bases, holder.__bases__)):
            holder.__bases__ = bases
    else:
        _refer_in_object(holder, instead)


def _refer_in_dict(holder: dict[Any, Any], instead: _Instead) -> None:
    for key, value in list(holder.items()):
        if instead.of(value) is not value:
            holder[key] = value = instead.of(value)
        if instead.of(key) is not key:
            del holder[key]
            holder[instead.of(key)] = value


def _refer_in_object(holder: Any, instead: _Instead) -> None:
    if id(type(holder)) in instead:
        with contextlib.suppress(TypeError):  # an object with another layout keeps its class
            object.__setattr__(holder, "__class__", instead.of(type(holder)))
    try:
        kept = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return
    if type(kept) is dict:  # the collector does not see a dictionary that is inlined in its object
        _refer_in_dict(kept, instead)
