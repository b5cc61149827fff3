"""Hides secrets in the texts of exceptions, which notebooks save: secrets of known forms, and values of known secrets.

Theory of operation. The text of an exception is the user's or a library's: ``401 for https://me:hunter2@host``, ``login failed
for 'sk-...'``. Two things in it are secrets. The first are those that a form gives away (`mask_forms`): passwords in URLs, HTTP
headers, tokens with a known prefix, ``password=...``. The second are values that the process knows to be secret because of the
name of their variable (`secrets_near`): in the environment, and in the frames of the traceback.

A text that is masked too much no longer explains the error, and names such as ``key`` and ``token`` also belong to parameters
and words. So prose (``password: must be a string``), numbers (``max_tokens=5``), paths and short words stay, and a value under
an ambiguous name is hidden only if it looks like a random one.

All work is bounded: the frames, the names, the number and the length of values; each expression has bounds for its repetitions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import FrameType, FunctionType, GetSetDescriptorType, ModuleType, TracebackType
from typing import Any

from monarch_kernel.runtime.diagnostics.reprs import HIDDEN, speaks_of_secret
from monarch_kernel.runtime.diagnostics.token_forms import NAMED, SIGNS, TOKENS

__all__ = ["Mask", "mask_forms", "secrets_near"]

_FORMS = re.compile(
    r"""
      (?P<head> \b [a-z][a-z0-9+.-]{0,20} ://  [^\s/?\#@:]{0,200} : ) [^\s/?\#]{1,500} (?= @ )  # the password of a URL
    | (?P<user> \b https?:// ) [^\s/?\#@:]{1,500} (?= @ )  # a token in place of a user
    | (?P<scheme> \b (?: authorization ["']? \s{0,3} [:=] \s{0,3} ["']? (?: (?: bearer | basic | token ) \s{1,3} )?
        | bearer \s{1,3} ) ) (?= [^\s"']{16} | [^\s"'0-9]{0,16} \d ) [^\s"',;]+  # a header
    | (?P<cookie> \b (?: set- )? cookie ["']? \s{0,3} [:=] \s{0,3} ["']? ) (?= [^\s"'=]{1,100} = ) [^\n"']+
    | (?P<basic> \b (?: basic | token ) \s{1,3} ) (?= [a-z+/_.=-]{0,100} \d ) [a-z0-9+/_.=-]{16,}
    | (?P<name> \b [\w-]{0,24} (?P<what> token | passw (?: or )? d | passphrase | pwd | secret | signature
      | (?: api | access | account | private ) [_-]? key )
      [\w-]{0,24} (?P<gap> ["']? \s{0,3} [=:] \s{0,3} ["']? ) ) (?P<value> [^\s&;,"']+ )
    | """
    + NAMED
    + r"""
    | (?P<pem> -----BEGIN[ ][A-Z ]{0,40}PRIVATE[ ]KEY----- ) (?: (?! -----END ) [\s\S] )+ (?: -----END [A-Z ]{0,40}----- )?
    | """
    + TOKENS,
    re.IGNORECASE | re.VERBOSE,
)
"""Matches secrets in prose. Stricter than that of values: a value is data, and the text of an error explains something."""

_KEPT = ("head", "user", "scheme", "cookie", "basic", "name", "option", "spoken", "login", "pair", "field", "pem")
"""Groups with what says where a secret is."""

_SIGNS = (
    *(
        "://",
        "bearer",
        "authorization",
        "cookie",
        "basic",
        "token",
        "passw",
        "passphrase",
        "pwd",
        "secret",
        "key",
        "signature",
    ),
    *SIGNS,
)
"""A text with none of these has no secret of a known form: a search for them takes a hundredth of the time."""

_PLAIN = re.compile(
    r"[-+\d.:x()\[\]{}%]*|(?:none|true|false|null|str|int|float|bytes|missing|required|\*+|<.*)\)?", re.I
)
"""Matches what follows a name in prose and is no secret: numbers, constants, types."""

_ODD_WORD = re.compile(r"(?=[^0-9]{0,100}[0-9])[\w+/=.!@#$%^&*~-]{7,}")
"""Matches what is no word of a language, and no expression: ``hunter2``, but neither ``string`` nor ``Tensor[8``."""

_CERTAIN = re.compile(
    r"passw|passphrase|secret|credential|bearer|authorization|jwt|(?:^|_)(?:pwd|dsn|pw)$"
    r"|(?:api|access|private|signing|encryption|account)_?key"
    r"|(?:access|auth|api|session|refresh|hf|hub|hugging_?face|github|gh|gitlab|slack|bot|wandb|pypi|npm|id)_?token",
    re.IGNORECASE,
)
"""Matches names whose values are secrets whatever they look like. ``key`` and ``token`` are also the names of other things."""

_RANDOM = re.compile(r"(?=[^0-9]*[0-9])(?=[^a-z]*[a-z])[a-z0-9+/=-]{16,}", re.IGNORECASE)
_NO_SECRET = re.compile(r"[/~.]|[A-Za-z]:\\|(?:true|false|none|null|yes|no|on|off|default|disabled|enabled|\d+)$", re.I)
"""Matches values that are no secrets under any name: paths, switches and numbers."""

_LEAST_LENGTH = 6
_MOST_LENGTH = 20_000
_MAX_FRAMES = 20  # at each end of a traceback
_MAX_NAMES = 5_000  # in a namespace
_MAX_WITHIN = 200  # in a dictionary or an object
_MAX_PARTS = 20_000  # in all of them
_PLAIN_KINDS = (str, bytes, int, float, bool, type(None), list, tuple, set, type, FunctionType, ModuleType)
_MAX_SECRETS = 200
_MAX_ERRORS = 20


def mask_forms(text: str) -> str:
    """Hide the secrets in a text that its form gives away."""
    lower = text.lower()
    return _FORMS.sub(_hidden, text) if any(sign in lower for sign in _SIGNS) else text


def _hidden(found: re.Match[str]) -> str:
    value = found["value"]
    if value is not None:
        is_prose = ":" in found["gap"] and not re.search("[\"']", found["gap"])
        is_vague = found["what"].lower() in ("token", "signature")
        if _PLAIN.fullmatch(value) or ((is_prose or is_vague) and not _ODD_WORD.fullmatch(value)):
            return found[0]
    return next((found[group] for group in _KEPT if found[group]), "") + HIDDEN


class Mask:
    """Hides secrets in the texts of one error.

    Args:
        secrets: values to hide wherever they occur.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = sorted(set(secrets), key=len, reverse=True)  # a value may contain another one

    def __call__(self, text: str) -> str:
        """Return a text without its secrets."""
        for secret in self._secrets:
            if secret in text:
                text = text.replace(secret, HIDDEN)
        return mask_forms(text)


def secrets_near(error: BaseException) -> set[str]:
    """Return the values of variables with the names of secrets: of the environment, and of the frames of an error."""
    found: set[str] = set()
    for name, value in _variables(error):
        if len(found) >= _MAX_SECRETS:
            break
        kind = type(value)  # isinstance() would ask an object for its __class__, which may be code of the user
        if (kind is str or kind is bytes) and speaks_of_secret(name):
            text = _text(value)
            if _is_secret(name, text):
                found.add(text)
    return found


def _text(value: Any) -> str:
    head: str | bytes = value[: _MOST_LENGTH + 1]
    return head if isinstance(head, str) else head.decode("latin-1")


def _is_secret(name: str, value: str) -> bool:
    if not _LEAST_LENGTH <= len(value) <= _MOST_LENGTH or _NO_SECRET.match(value):
        return False
    return bool(_CERTAIN.search(name) or _RANDOM.fullmatch(value))


def _within(value: Any) -> Iterator[tuple[str, object]]:
    """Yield the items of a dictionary, or the attributes that are set on an object, without running code of its class.

    They are those of one level: ``self.token``, ``config["password"]``.
    """
    kind = type(value)
    if kind is not dict:
        if any(kind is plain for plain in _PLAIN_KINDS):
            return
        bases = (type.__getattribute__(base, "__dict__") for base in type.__getattribute__(kind, "__mro__"))
        slot = next((names["__dict__"] for names in bases if "__dict__" in names), None)
        if type(slot) is not GetSetDescriptorType:  # it has no such attributes, or a property of the user's
            return
        value = slot.__get__(value)
        if type(value) is not dict:  # a class or a module
            return
    yield from ((name, part) for name, part in _copied(value) if type(name) is str)


def _variables(error: BaseException) -> Iterator[tuple[str, object]]:
    yield from list(os.environ.items())
    frames = list(_frames(error))
    spaces = {id(frame.f_globals): frame.f_globals for frame in frames}
    left = _MAX_PARTS
    for names in (*(frame.f_locals for frame in frames if frame.f_locals is not frame.f_globals), *spaces.values()):
        for name, value in islice(_copied(names), _MAX_NAMES):
            if type(name) is str:
                yield name, value
                parts = list(islice(_within(value), min(_MAX_WITHIN, left)))
                left -= len(parts)
                yield from parts


def _copied(names: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Return the items of a namespace; another thread may bind names meanwhile."""
    for _ in range(3):
        try:
            return iter(list(names.items()))
        except RuntimeError:
            continue
    return iter(())


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames of an error and of those that it is chained to or made of, the innermost of each first."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending and len(seen) < _MAX_ERRORS:
        one = pending.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        frames = list(_of_traceback(one.__traceback__))[::-1]
        yield from frames[:_MAX_FRAMES]
        yield from frames[max(_MAX_FRAMES, len(frames) - _MAX_FRAMES) :]
        pending += [one.__cause__, one.__context__]
        members = getattr(one, "exceptions", None)  # of an ExceptionGroup
        if isinstance(members, (list, tuple)):
            pending += [each for each in members[:_MAX_ERRORS] if isinstance(each, BaseException)]


def _of_traceback(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
