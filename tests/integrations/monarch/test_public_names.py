"""Each public name of Monarch is here, or refused with a reason, and takes the arguments that it takes there."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import monarch_kernel.integrations.monarch as alias
from monarch_kernel.actor.actor_mesh import BoundEndpoint
from monarch_kernel.integrations.monarch.actor import ProcId, Uid
from monarch_kernel.integrations.monarch.ndslice import NDSlice, Shape

NAMES = Path(__file__).with_name("public_names.txt")

SAMPLES = {
    "Endpoint": BoundEndpoint,
    "NDSlice": NDSlice.new_row_major([2]),
    "ProcId": ProcId.from_string("p@1"),
    "Shape": Shape.unity(),
    "Uid": Uid.from_string("u"),
}
"""What has the attributes of a class, where that is not the class: objects, or the class of the endpoints of meshes."""

_NO_LIMIT = "a transfer has no limit of time unless one is given"
_STREAM = "the stream that is active gets the result"
_IN_PLACE = "the result has the shape and the ranks of the tensor that it is written into"
_OURS = "the name of a parameter that callers give by its position"

DIFFERENT: Mapping[str, str] = {
    "monarch:Stream": "`_default` is private",
    "monarch:Stream.borrow": _OURS,
    "monarch:Tensor.delete_ref": "private in all but its name",
    "monarch:Tensor.drop": "the memory is free when Python has no reference: `del x`",
    "monarch:Tensor.dropped": "the memory is free when Python has no reference: `del x`",
    "monarch:Tensor.reduce": "`_inplace` is private: `reduce_`",
    "monarch:Tensor.reduce_": _IN_PLACE,
    "monarch:Tensor.to_mesh": _STREAM,
    "monarch:call_on_shard_and_fetch": _OURS,
    "monarch:fetch_shard": _OURS,
    "monarch:inspect": _OURS,
    "monarch:reduce": "`_inplace` is private: `reduce_`",
    "monarch:reduce_": _IN_PLACE,
    "monarch:slice_mesh": _OURS,
    "monarch:to_mesh": _STREAM,
    "monarch.actor:ActorError": "without a message there is another text",
    "monarch.actor:Point.size": _OURS,
    "monarch.actor:Port.exception": _OURS,
    "monarch.actor:Port.send": _OURS,
    "monarch.actor:ProcMesh.rank_tensor": _OURS,
    "monarch.rdma:RDMAAction.submit": _NO_LIMIT,
    "monarch.rdma:RDMABuffer.read_into": _NO_LIMIT,
    "monarch.rdma:RDMABuffer.write_from": _NO_LIMIT,
}
"""Names of the list that differ on purpose, with the reason."""


class Name(NamedTuple):
    """A line of the list."""

    module: str
    path: tuple[str, ...]
    parameters: str | None

    def __str__(self) -> str:
        return f"{self.module}:{'.'.join(self.path)}"


def names() -> list[Name]:
    found = []
    for line in NAMES.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([\w.]+):([\w.]+)(?:\((.*)\))?", line)
            assert match is not None, line
            found.append(Name(match[1], tuple(match[2].split(".")), match[3]))
    return found


def module_of(name: Name) -> Any:
    below = name.module.removeprefix("monarch").removeprefix(".")
    below = alias.SUBMODULES.get(below, below)
    return importlib.import_module(f"{alias.__name__}.{below}" if below else alias.__name__)


def found(name: Name) -> Any:
    """Return what has the name; None if the name is refused with a reason."""
    module = module_of(name)
    first, *rest = name.path
    try:
        value: Any = getattr(module, first)
    except AttributeError as error:
        assert "has no attribute" not in str(error), f"{name} is neither there nor refused with a reason"
        assert not rest
        return None
    for part in rest:
        value = getattr(SAMPLES.get(first, value), part)
    return value


def parameters_of(value: Any, name: Name) -> inspect.Signature:
    """Return the signature that a caller sees, without ``self``."""
    signature = inspect.signature(value)
    is_of_class = len(name.path) > 1 and inspect.isfunction(value)
    parameters = list(signature.parameters.values())
    return signature.replace(parameters=parameters[1:] if is_of_class else parameters)


def theirs(name: Name) -> inspect.Signature:
    scope: dict[str, Any] = {}
    exec(f"def function({name.parameters}): pass", scope)
    return inspect.signature(scope["function"])


def refused(there: inspect.Signature, here: inspect.Signature) -> list[str]:
    """List what a call can do there and not here."""
    kinds = inspect.Parameter
    ours = list(here.parameters.values())
    takes_any = {kind: any(each.kind is kind for each in ours) for kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)}
    positional = [each for each in ours if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    named = {each.name: each for each in ours if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    problems, known = [], set()
    for i, each in enumerate(there.parameters.values()):
        if each.kind in takes_any:
            problems += [] if takes_any[each.kind] else [f"takes no further arguments ({each})"]
            continue
        other = named.get(each.name)
        known.add(each.name)
        if each.kind is kinds.POSITIONAL_OR_KEYWORD:
            if i < len(positional) and positional[i] is not other:
                known.add(positional[i].name)
                if other is None:
                    problems.append(f"{each.name} is {positional[i].name} here")
                    other = positional[i]
            elif i >= len(positional) and not takes_any[kinds.VAR_POSITIONAL]:
                problems.append(f"{each.name} can't be given by its position")
        if other is None:
            problems += [] if takes_any[kinds.VAR_KEYWORD] else [f"{each.name} can't be given"]
        elif each.default not in (kinds.empty, ...) and other.default != each.default:
            problems.append(f"{each.name} is {other.default!r} by default")
    problems += [
        f"{each.name} must be given"
        for each in ours
        if each.default is kinds.empty and each.kind not in takes_any and each.name not in known
    ]
    return problems


@pytest.mark.parametrize("module", sorted({name.module for name in names()}))
def test_each_name_is_there_or_refused_with_a_reason(module: str) -> None:
    absent = []
    for name in names():
        if name.module == module and str(name) not in DIFFERENT:
            try:
                found(name)
            except (AttributeError, AssertionError) as error:
                absent.append(f"{name}: {error}")
    assert absent == []


def test_each_callable_takes_the_arguments_that_it_takes_there() -> None:
    problems = {}
    for name in names():
        if name.parameters is None:
            continue
        try:
            value = found(name)
        except AttributeError:
            continue  # the test above has it
        if value is not None and (bad := refused(theirs(name), parameters_of(value, name))):
            problems[str(name)] = bad
    unknown = {name: bad for name, bad in problems.items() if name not in DIFFERENT}
    assert unknown == {}


def test_each_known_difference_is_one() -> None:
    listed = {str(name): name for name in names()}
    for difference, reason in DIFFERENT.items():
        name = listed[difference]
        assert reason
        try:
            value = found(name)
        except AttributeError:
            continue
        assert refused(theirs(name), parameters_of(value, name)), f"{difference} no longer differs"


def test_a_call_that_is_refused_here_is_found() -> None:
    """The comparison itself: a test that finds nothing proves nothing."""

    def there(a, b=1, *args, c=2, **kwargs):  # type: ignore[no-untyped-def]
        pass

    def other(x, *, b=1, c=3, d):  # type: ignore[no-untyped-def]
        pass

    bad = refused(inspect.signature(there), inspect.signature(other))
    assert bad == [
        "a is x here",
        "b can't be given by its position",
        "takes no further arguments (*args)",
        "c is 3 by default",
        "takes no further arguments (**kwargs)",
        "d must be given",
    ]
    assert refused(inspect.signature(there), inspect.signature(there)) == []
