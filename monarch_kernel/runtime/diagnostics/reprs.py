"""Describes values in a few words, without calling code of the user or waiting for a device."""

from __future__ import annotations

import functools
import os
import re
import sys
from typing import Any

from monarch_kernel.runtime.diagnostics.token_forms import NAMED, TOKENS

__all__ = ["HIDDEN", "SWITCH", "describe_value", "describe_variable", "is_tensor", "speaks_of_secret"]

SWITCH = "MONARCH_ERROR_VALUES"
"""The variable of the environment that is ``0`` if errors are to show types and shapes only, and no values."""

HIDDEN = "…"
"""What is shown in place of a secret."""

_SECRET_NAME = re.compile(
    r"token|passw|passphrase|pwd|secret|credential|key|cookie|bearer|auth(?!or(?!iz|is))"
    r"|passcode|mnemonic|seed_?phrase|webhook|csrf|session_?id|connection_?string|(?<=[a-z])(?-i:Pass)(?![a-z])"
    r"|(?:^|[_.-])(?:cred|creds|dsn|jwt|otp|totp|pat|pem|pw|sas|sid|conn_?str)(?:$|[_.\d])|(?:^|[_.-])(?:pass|pin)(?:$|[.\d])",
    re.IGNORECASE,
)
"""Matches names of variables that speak of a secret; ``author`` does not, ``authorization`` does."""

_SECRET_IN_TEXT = re.compile(
    r"""
      (?P<head> \b [a-z][a-z0-9+.-]* ://  [^\s/?\#@:]* : ) [^\s/?\#]+ (?= @ )  # the password of a URL
    | (?P<user> \b https?:// ) [^\s/?\#@:]+ (?= @ )  # a token in place of a user
    | (?P<scheme> \b (?: bearer \s+ (?= \S{16} | \S*\d | \S+ \s* \Z )  # a header
      | (?: authorization | cookie ) \s* [:=] \s* ) ) \S .*
    | (?P<basic> \b (?: basic | token ) \s+ ) [A-Za-z0-9+/_.=-]{12,}
    | (?P<name> (?<![\w-]) [\w-]* (?: token | passw | passphrase | passcode | pwd | secret | api_?-?key | access_?-?key
      | private_?-?key | signature | webhook ) [\w-]*
      ["']? \s* [=:] \s* ["']? ) [^\s&;,"']+  # a part of a query, of a data source name, of a configuration
    | (?P<pem> -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY----- ) .*
    | """
    + NAMED
    + "|"
    + TOKENS,
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
"""Matches secrets in texts: passwords in URLs, headers of HTTP requests, ``password=...``, and tokens of well-known forms."""

_VALUE_LENGTH = 80
_SEARCHED_LENGTH = 4_096
_SCALARS = (bool, int, float, complex, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset)


def describe_value(value: object) -> str:
    """Describe a value in at most 80 characters, calling code of its class only if the class is a known one."""
    try:
        text = _describe_value(value)
    except Exception as error:  # a subclass of a known type may violate its contract
        text = f"{type(value).__name__} (can't be described: {type(error).__name__})"
    return _cut(text.replace("\n", " "), _VALUE_LENGTH)


def describe_variable(name: str, value: object) -> str:
    """Describe the value of a variable in an error, which a notebook may save.

    Of a variable whose name speaks of a secret, such as ``api_key``, the content is left out. Shapes and types are not content:
    ``tokens`` and ``key`` are also the names of tensors. Of texts, what looks like a secret is left out under any name.
    """
    if os.environ.get(SWITCH) == "0":
        return _without_content(value) or type(value).__name__
    if speaks_of_secret(name):
        return _without_content(value) or HIDDEN
    return describe_value(value)


@functools.lru_cache(maxsize=10_000)  # a report looks at all names of a namespace
def speaks_of_secret(name: str) -> bool:
    """Whether the name of a variable speaks of a secret."""
    return _SECRET_NAME.search(name) is not None


def _without_content(value: object) -> str:
    """Describe a value if that can show nothing of its content; else return an empty text."""
    kind = type(value)
    if kind in (*_SCALARS, str, bytes, *_CONTAINERS):
        return ""
    is_array = kind.__module__.partition(".")[0] == "numpy"
    if is_array and kind.__name__ != "ndarray":
        return ""
    return describe_value(value).partition(" = ")[0] if is_tensor(value) else describe_value(value)


def _describe_value(value: object) -> str:
    kind = type(value)
    if kind in _SCALARS:
        return _scalar(value)
    if kind in (str, bytes):
        return _text(value)  # type: ignore[arg-type]
    if kind in _CONTAINERS:
        return _container(value)
    if is_tensor(value):
        return _tensor(value)
    module = kind.__module__.partition(".")[0]
    if module == "numpy":
        return _array(value)
    if module == "torch":
        return _torch_object(value)
    return kind.__name__


def _scalar(value: Any) -> str:
    if type(value) is int and value.bit_length() > 128:
        return f"int of {value.bit_length()} bits"
    return repr(value)


def _text(value: str | bytes) -> str:
    head = value[:_SEARCHED_LENGTH]
    shown = head if isinstance(head, str) else head.decode("latin-1")
    without = _SECRET_IN_TEXT.sub(_first_part, shown)
    if without != shown:
        prefix = "" if isinstance(value, str) else "b"
        return f"{prefix}{_cut(without, 50)!r}"
    return repr(value) if len(value) <= 60 else f"{value[:50]!r}... ({len(value)} long)"


def _first_part(secret: re.Match[str]) -> str:
    """Return what is shown in place of a secret: what says where it is, such as the name of its scheme."""
    return next((text for text in secret.groupdict().values() if text), "") + HIDDEN


def _container(value: Any) -> str:
    plain = type(value) in (list, tuple) and len(value) <= 6
    if plain and all(type(item) in _SCALARS or (type(item) is str and len(item) < 20) for item in value):
        is_pair = type(value) is tuple and len(value) == 2
        inner = ", ".join(_item(item, before, is_pair) for item, before in zip(value, (None, *value), strict=False))
        return f"[{inner}]" if type(value) is list else f"({inner}{',' if len(value) == 1 else ''})"
    return f"{type(value).__name__} of {len(value)}"


def _item(item: Any, before: object, is_pair: bool) -> str:
    """Describe an item of a list; the one before it may name it: an option of a command, or the name in a pair."""
    if type(before) is str and (is_pair or before.startswith("-")) and _SECRET_NAME.search(before):
        return HIDDEN
    return _text(item) if type(item) is str else _scalar(item)


def is_tensor(value: object) -> bool:
    """Whether a value is a torch tensor; torch need not be imported."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and issubclass(type(value), tensor)


def _tensor(value: Any) -> str:
    torch = sys.modules["torch"]
    known = type(value) in (torch.Tensor, torch.nn.Parameter)
    text = f"{type(value).__name__}[{', '.join(map(str, value.shape))}] {str(value.dtype)[6:]} {value.device}"
    if not known and (local := _local(value)) is not None:  # a DTensor, of which this rank has a shard
        text += f", here [{', '.join(map(str, local.shape))}]"
    if value.requires_grad:
        text += " requires_grad"
    # Reading the value is cheap only on the CPU: on a device it would wait for all queued work.
    if known and value.device.type == "cpu" and value.dim() == 0:
        text += f" = {value.item()!r}"
    return text


def _local(value: Any) -> Any:
    try:
        return object.__getattribute__(value, "_local_tensor")
    except AttributeError:
        return None


def _array(value: Any) -> str:
    if type(value).__name__ == "ndarray":
        return f"ndarray[{', '.join(map(str, value.shape))}] {value.dtype}"
    numpy = sys.modules["numpy"]
    return str(value) if isinstance(value, (numpy.number, numpy.bool_)) else type(value).__name__


def _torch_object(value: Any) -> str:
    torch = sys.modules["torch"]
    if type(value) in (torch.device, torch.dtype, torch.Size):
        return repr(value)
    if isinstance(value, torch.nn.Module):
        return f"{type(value).__name__}({value.extra_repr()})"
    return type(value).__name__


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
