"""Inspects a rank's namespace without running any of the user's code, for completion and inspection.

Theory of operation. This code does not run on the thread that runs the cells, and a cell may be running. So nothing here may
have a side effect, wait for a device or take long. Names are looked up in the dictionaries of objects and classes, never with
``getattr``, nor with ``isinstance``, which reads the ``__class__`` of an object. Properties, ``__getattr__``, ``__getitem__``
and ``__repr__`` of Python classes are not called. Values that C code computes (a tensor's shape, a slot) are read only from
types whose C code can't call Python. Submodules, parameters and buffers of ``torch.nn.Module`` are read from its own tables.
The length of every list is bounded.
"""

from __future__ import annotations

import ast
import builtins
import collections
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

from monarch_kernel.runtime.diagnostics.reprs import describe_value

__all__ = ["about", "arguments", "attributes", "find", "keys", "kind_of", "names"]

_MAX_LISTED = 3_000
_MAX_KEYS = 1_000
_MAX_KIND = 80
_MAX_NAME = 200
_MAX_TEXT = 50_000
_TABLES = ("_parameters", "_buffers", "_modules")
"""The tables of `torch.nn.Module` whose entries are visible as attributes."""

_KINDS: dict[type, str] = {
    types.ModuleType: "module",
    types.FunctionType: "function",
    types.BuiltinFunctionType: "function",
    types.MethodType: "function",
    types.MethodWrapperType: "function",
    types.WrapperDescriptorType: "function",
    types.MethodDescriptorType: "function",
    types.ClassMethodDescriptorType: "function",
    staticmethod: "function",
    classmethod: "function",
    functools.partial: "function",
    property: "property",
    functools.cached_property: "property",
    types.GetSetDescriptorType: "property",
    types.MemberDescriptorType: "property",
}
_SEQUENCES = (list, tuple, str, bytes, collections.deque)
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_MISSING = object()


def kind_of(value: object) -> str:
    """Describe the kind of a value in a few words: ``Linear``, ``module``, ``function``, ``Tensor[4, 3] float32``."""
    kind = type(value)
    known = _KINDS.get(kind)
    if known is not None:
        return known
    if issubclass(kind, type):
        return "class"
    name = kind.__name__
    if name in ("Tensor", "Parameter", "ndarray") and (_is_plain_tensor(value) or _is_array(value)):
        array: Any = value
        name = f"{name}[{', '.join(map(str, array.shape))}] {str(array.dtype).removeprefix('torch.')}"
    return name[:_MAX_KIND]


def names(namespace: Mapping[str, object], hidden: Collection[str]) -> list[tuple[str, str]]:
    """Return the user's variables with their kinds."""
    stored = dict(namespace)
    theirs = [name for name in stored if _is_name(name) and name[:1] != "_" and name not in hidden]
    return [(name, kind_of(stored[name])) for name in theirs[:_MAX_LISTED]]


def find(expression: str, namespace: Mapping[str, object], imports: Mapping[str, str]) -> Any:
    """Find the value of an expression of names, attributes and constant subscripts.

    Args:
        expression: such as ``model.layers[0]``.
        namespace: the namespace to search first.
        imports: names that the cell imports -> dotted path; only modules that are loaded already are found.

    Raises:
        LookupError: it has no value, or finding the value would run code.
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body, namespace, imports)
    except LookupError:
        raise
    except Exception as error:  # a type that violates the contract of its base class
        raise LookupError(expression) from error


def _is_name(name: object) -> TypeGuard[str]:
    """Whether a key is a text that can be offered: keys come from data, too."""
    return type(name) is str and len(name) <= _MAX_NAME


def attributes(value: object, *, private: bool) -> list[tuple[str, str]]:
    """List attributes with their kinds: the object's own first, then its class's; with ``private`` also ``_names``."""
    found: dict[str, str] = {}
    for group in (_own_tables(value), _class_tables(value)):
        stored: dict[str, Any] = {}
        for table in group:
            stored = {**table, **stored}
        names = [name for name in stored if _is_name(name) and name.isidentifier() and name not in found]
        for name in sorted(names, key=lambda name: (name.startswith("_"), name)):
            if private or not name.startswith("_"):
                found[name] = kind_of(stored[name])
    return list(itertools.islice(found.items(), _MAX_LISTED))


def keys(value: object) -> list[tuple[str | int, str]]:
    """List the keys of a mapping that are integers, or texts that a line of code can show, with the kinds of their values."""
    table: Any = value
    if type(value) not in _MAPPINGS and not (_is_dict(value) and _class_attribute(value, "__iter__") is dict.__iter__):
        table = _children(value) or _columns(value)
    first = list(itertools.islice(table, _MAX_KEYS))
    shown = (key for key in first if (_is_name(key) and key.isprintable()) or type(key) is int)
    return [(key, kind_of(dict.get(table, key))) for key in shown]


def arguments(value: object) -> list[tuple[str, str]]:
    """List the names of the arguments that a function or class accepts by keyword."""
    signature = _signature(value)
    takes = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = (each.name for each in signature.parameters.values() if each.kind in takes)
    return [(f"{name}=", "param") for name in named if _is_name(name)]


def about(value: object, *, source: bool) -> dict[str, str]:
    """Describe an object: title -> text, in display order; with ``source`` also its source."""
    described: dict[str, str] = {}
    shown = _called(value) if _is_instance(value) else value
    if shown is not None:
        title = "Init signature" if _is_class(value) else "Call signature" if shown is not value else "Signature"
        try:
            described[title] = f"{_name(value)}{_written(_signature(shown), skip_self=shown is not value)}"
        except (LookupError, TypeError, ValueError):
            pass
    described["Type"] = kind_of(value) if not _is_instance(value) else type(value).__name__
    if _is_instance(value) and (text := describe_value(value)) != described["Type"]:
        described["Value"] = text
    place = _unwrapped(value)
    code = getattr(place, "__code__", None) if type(place) is types.FunctionType else None
    if code is not None:
        described["File"] = f"{code.co_filename}, line {code.co_firstlineno}"
    if source:
        try:
            described["Source"] = inspect.getsource(place if not _is_instance(value) else type(value))[:_MAX_TEXT]
        except (OSError, TypeError):
            pass
    if "Source" not in described:
        try:
            doc = _attribute(value, "__doc__")
        except LookupError:
            doc = None
        if isinstance(doc, str) and doc.strip():
            described["Docstring"] = inspect.cleandoc(doc)[:_MAX_TEXT]
    return {title: text[:_MAX_TEXT] for title, text in described.items()}


# Values of expressions.


def _value(node: ast.expr, namespace: Mapping[str, object], imports: Mapping[str, str]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return _named(node.id, namespace, imports)
    if isinstance(node, ast.Attribute):
        return _attribute(_value(node.value, namespace, imports), node.attr)
    if isinstance(node, ast.Subscript):
        return _item(_value(node.value, namespace, imports), _value(node.slice, namespace, imports))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        operand = _value(node.operand, namespace, imports)
        if type(operand) in (int, float):
            return -operand
    if isinstance(node, ast.Tuple):
        return tuple(_value(item, namespace, imports) for item in node.elts)
    raise LookupError(f"evaluating a {type(node).__name__} would run code")


def _named(name: str, namespace: Mapping[str, object], imports: Mapping[str, str]) -> Any:
    if name in namespace:
        return namespace[name]
    if name in imports:
        path, attributes = imports[name], list[str]()
        while path not in sys.modules:
            path, _, last = path.rpartition(".")
            if not path:
                raise LookupError(name)
            attributes.insert(0, last)
        value: Any = sys.modules[path]
        for attribute in attributes:
            value = _attribute(value, attribute)
        return value
    if name in builtins.__dict__:
        return builtins.__dict__[name]
    raise LookupError(name)


def _attribute(value: object, name: str) -> Any:
    """Return an attribute that is stored, or computed by known C code."""
    if _is_module(value):
        stored = _instance_dict(value)
        if name in stored:
            return stored[name]
        return sys.modules[f"{stored.get('__name__')}.{name}"]
    if _is_class(value):
        return _plain(_in_classes(value, name))  # type: ignore[arg-type]
    raw = _class_attribute(value, name)
    if type(raw) in (types.GetSetDescriptorType, types.MemberDescriptorType) or type(raw).__name__ == "_tuplegetter":
        if _is_tensor(value) and not _is_plain_tensor(value):
            raise LookupError(f"{name} of a tensor subclass may run Python code")
        return raw.__get__(value, type(value))
    for table in (_instance_dict(value), *_nn_tables(value)):
        if name in table:
            return table[name]
    if raw is None:
        raise LookupError(name)
    if type(raw) is types.FunctionType:
        return types.MethodType(raw, value)
    if type(raw) in (types.MethodDescriptorType, types.WrapperDescriptorType):
        return raw.__get__(value, type(value))
    return _plain(raw)


def _plain(raw: object) -> Any:
    if type(raw) in (staticmethod, classmethod):
        return raw.__func__  # type: ignore[attr-defined]
    if raw is None or _class_attribute(raw, "__get__") is None or _is_function(raw):
        return raw
    raise LookupError("reading a descriptor would run code")


def _is_function(raw: object) -> bool:
    """Whether a value is some kind of function, which looking it up in its class returns unchanged."""
    return _KINDS.get(type(raw)) == "function"


def _item(value: object, key: object) -> Any:
    kind = type(value)
    if any(type(part) not in (str, int, float, bool, type(None)) for part in (key if type(key) is tuple else [key])):
        raise LookupError("hashing the key may run code")
    if kind in _SEQUENCES and type(key) is int:
        return value[key]  # type: ignore[index]
    if _is_dict(value) and _class_attribute(value, "__getitem__") in (dict.__getitem__, None):
        found = dict.get(value, key, _MISSING)  # type: ignore[call-overload]
        if found is _MISSING:
            raise LookupError(key)
        return found
    children = _children(value)
    if type(key) is int:
        return list(children.values())[key]
    return children[str(key)]


# Stored parts of objects.


def _is_module(value: object) -> bool:
    return issubclass(type(value), types.ModuleType)


def _is_class(value: object) -> bool:
    return issubclass(type(value), type)


def _is_dict(value: object) -> bool:
    return issubclass(type(value), dict)


def _is_instance(value: object) -> bool:
    return not (_is_module(value) or _is_class(value) or type(value) in _KINDS)


def _is_tensor(value: object) -> bool:
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and issubclass(type(value), tensor)


def _is_plain_tensor(value: object) -> bool:
    """Whether reading a tensor's attributes runs no Python: any other subclass may have ``__torch_function__``."""
    torch: Any = sys.modules.get("torch")
    return _is_tensor(value) and type(value) in (torch.Tensor, torch.nn.Parameter)


def _is_array(value: object) -> bool:
    return type(value) is getattr(sys.modules.get("numpy"), "ndarray", None)


def _in_classes(kind: type, name: str) -> Any:
    for one in type.__dict__["__mro__"].__get__(kind):
        stored = type.__dict__["__dict__"].__get__(one)
        if name in stored:
            return stored[name]
    raise LookupError(name)


def _class_attribute(value: object, name: str) -> Any:
    try:
        return _in_classes(type(value), name)
    except LookupError:
        return None


def _instance_dict(value: object) -> dict[str, Any]:
    if _is_module(value):
        return types.ModuleType.__dict__["__dict__"].__get__(value)  # type: ignore[no-any-return, index]
    holder = _class_attribute(value, "__dict__")
    stored = holder.__get__(value, type(value)) if type(holder) is types.GetSetDescriptorType else None
    return stored if type(stored) is dict else {}


def _nn_tables(value: object) -> list[dict[str, Any]]:
    stored = _instance_dict(value)
    if "_modules" not in stored:
        return []
    return [stored[name] for name in _TABLES if type(stored.get(name)) in (dict, collections.OrderedDict)]


def _children(value: object) -> dict[str, Any]:
    """Return the modules in a `torch.nn.ModuleList`, `Sequential` or `ModuleDict`."""
    nn: Any = getattr(sys.modules.get("torch"), "nn", None)
    if nn is not None and issubclass(type(value), (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        return dict(_instance_dict(value).get("_modules") or {})
    return {}


def _columns(value: object) -> dict[Any, Any]:
    if type(value) is getattr(sys.modules.get("pandas"), "DataFrame", None):
        return dict.fromkeys(list(value.columns))  # type: ignore[attr-defined]
    if _is_array(value):
        return dict.fromkeys(value.dtype.names or ())  # type: ignore[attr-defined]
    return {}


def _own_tables(value: object) -> list[Mapping[str, Any]]:
    """Return the mappings in which an object itself stores its attributes, the nearest first."""
    if _is_class(value):
        return []
    stored = _instance_dict(value)
    if not _is_module(value):
        return [stored, *_nn_tables(value)]
    start = f"{stored.get('__name__')}."
    loaded = {name.removeprefix(start): each for name, each in sys.modules.copy().items() if name.startswith(start)}
    return [stored, loaded]


def _class_tables(value: object) -> list[Mapping[str, Any]]:
    """Return the mappings in which the class of an object, or a class itself, stores attributes, the nearest first."""
    if _is_module(value):
        return []
    classes = type.__dict__["__mro__"].__get__(value if _is_class(value) else type(value))
    return [type.__dict__["__dict__"].__get__(one) for one in classes]


# Signatures.


def _unwrapped(value: object) -> Any:
    return value.__func__ if type(value) is types.MethodType else value


def _called(value: object) -> Any:
    """Return the function that a call of an object runs from the user's point of view."""
    return _class_attribute(value, "forward" if _nn_tables(value) else "__call__")


def _signature(value: object) -> inspect.Signature:
    if not (_is_class(value) or _is_function(value)):
        raise LookupError("no function")
    return inspect.signature(value)  # type: ignore[arg-type]


class _Text:
    """Text to show in place of a default or an annotation, whose own ``__repr__`` may be the user's."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _written(signature: inspect.Signature, *, skip_self: bool) -> str:
    empty = inspect.Parameter.empty
    parameters = [
        each.replace(
            default=empty if each.default is empty else _Text(describe_value(each.default)),
            annotation=_annotation(each.annotation),
        )
        for each in list(signature.parameters.values())[skip_self:]
    ]
    returns = _annotation(signature.return_annotation)
    return str(signature.replace(parameters=parameters, return_annotation=returns))


def _annotation(annotation: Any) -> Any:
    if annotation is None or annotation is inspect.Parameter.empty or _is_class(annotation):
        return annotation
    if type(annotation) is str:
        return _Text(annotation)
    if type(annotation).__module__ in ("typing", "types"):
        return annotation
    return _Text(kind_of(annotation))


def _name(value: object) -> str:
    if _is_instance(value):
        return ""
    name = getattr(_unwrapped(value), "__name__", "")
    return name if isinstance(name, str) else ""
