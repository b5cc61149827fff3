"""Checks MIME bundles that ranks display, and converts them to HTML for a page that shows several.

A bundle may contain what its rank has read from a file or a network. On such a page its parts become markup, so a part that is
not what its MIME type says could change the page around it. `checked` leaves out such parts, and `embedded` accepts only HTML
that closes all that it opens. HTML and JavaScript that a rank displays act in the page as those of any cell do.
"""

from __future__ import annotations

import base64
import html
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from html.parser import HTMLParser
from typing import Any

from monarch_kernel.base.text import one_line, printable

__all__ = ["Bundle", "checked", "embedded", "nbytes", "title"]

Bundle = Mapping[str, Any]

_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_SVG = "image/svg+xml"
_EMBEDDABLE = frozenset(("text/plain", "text/html", _SVG, "text/latex", "text/markdown", *_IMAGES))
_MIME = re.compile(r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,99}/[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,99}(?:;[ -~]{0,100})?")
_BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}")
_MAX_NOTED = 4
_MAX_NAME = 80
_MAX_PARSED = 1 << 20
_MAX_DEPTH = 100
_SAYS_NOTHING = re.compile(r"<.* object( at 0x[0-9a-f]+)?>")

_NOT_IN_HTML = re.compile(
    r"<(?:script|html|head|body|frame|frameset|iframe|base|meta|plaintext|xmp|textarea|title|noembed|noframes|noscript"
    r"|template|select)\b",
    re.IGNORECASE,
)
"""Elements that need a page for themselves, or whose content is not parsed as other HTML is."""

_NOT_A_TAG = re.compile(r"<(?!/?[a-zA-Z])")
_NO_END = frozenset(
    "area base br col embed hr img input link meta param source track wbr".split()  # noqa: SIM905
)
_MAY_LACK_END = frozenset("li dt dd p rt rp option optgroup colgroup thead tbody tfoot tr td th".split())  # noqa: SIM905
_ENDS_SVG = frozenset(
    "b big blockquote br center code dd div dl dt em embed foreignobject h1 h2 h3 h4 h5 h6 hr i img li listing menu nobr ol p "  # noqa: SIM905
    "pre ruby s small span strong strike style sub sup table tt u ul var font".split()
)
"""Elements in a drawing that are parsed by other rules than the drawing."""

_TAG = re.compile(
    r"""<[a-zA-Z][\w:.-]*(?:\s+[^\s"'<>/=]+(?:\s*=\s*(?:"[^"]*"|'[^']*'|[^\s"'=<>`]+))?)*\s*/?>""", re.ASCII
)


def checked(data: Bundle, metadata: Bundle) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a bundle and its metadata without the parts that are not what their MIME types say.

    The text of the bundle names what was left out. It keeps colours, but no other terminal controls. Numbers that JSON lacks
    become null.
    """
    kept: dict[str, Any] = {}
    left_out: list[str] = []
    for mime, value in data.items():
        if not (problem := _problem(mime, value)):
            try:
                kept[mime] = _without_nan(value)
                continue
            except (ValueError, RecursionError):
                problem = "a structure that is too deep or contains itself"
        left_out.append(f"{one_line(str(mime))[:_MAX_NAME]} ({problem})")
    if "text/plain" in kept:
        kept["text/plain"] = printable(kept["text/plain"])
    if left_out:
        more = f" and {len(left_out) - _MAX_NOTED:,} more" * (len(left_out) > _MAX_NOTED)
        note = f"… left out here: {', '.join(left_out[:_MAX_NOTED])}{more}"
        kept["text/plain"] = "\n".join(filter(None, (kept.get("text/plain"), note)))
    about = {}
    for key, value in metadata.items():
        with suppress(ValueError, RecursionError):
            about[str(key)] = _without_nan(value)
    return kept, about


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinite numbers, which JSON lacks, by null, as JavaScript does, and other keys than texts by texts.

    Otherwise jupyter_client prints a warning into the cell and sends the texts ``nan`` and ``inf``, which charts take for
    categories.

    Raises:
        ValueError: it contains itself.
        RecursionError: it is too deep.
    """
    if isinstance(value, str):
        return value
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError):  # TypeError: a key, or a value that jupyter_client converts, such as a date
        value = _as_json(value)
        json.dumps(value, allow_nan=False, default=str)
    return value


def _as_json(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else _key(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value


def _key(key: object) -> str:
    return json.dumps(key) if key is None or isinstance(key, bool) else str(key)


def _problem(mime: object, value: object) -> str:
    """Say why a part of a bundle can't be shown; empty if it can."""
    if not isinstance(mime, str) or not _MIME.fullmatch(mime):
        return "not a MIME type"
    kind = mime.partition(";")[0].lower()
    is_text = kind.startswith("text/") or kind.endswith("+xml") or kind in ("application/javascript", "application/xml")
    is_binary = kind == "application/pdf" or (kind.partition("/")[0] in ("image", "audio", "video") and not is_text)
    if (is_text or is_binary) and not isinstance(value, str):
        return "not a text"
    if is_binary and not _is_base64(str(value)):
        return "not base64"
    return ""


def _is_base64(text: str) -> bool:
    return _BASE64.fullmatch("".join(text.split())) is not None


def embedded(data: Bundle, metadata: Bundle) -> str | None:
    """Convert a bundle from `checked` to HTML; None if that is impossible."""
    if not set(data) <= _EMBEDDABLE:
        return None
    if "text/html" in data:
        return data["text/html"] if _is_closed(data["text/html"]) else None
    if _SVG in data:  # as an image, which sanitizers leave intact
        return _img(_SVG, base64.b64encode(data[_SVG].encode("utf-8", "replace")).decode(), metadata, data)
    for mime in _IMAGES:
        if mime in data:
            return _img(mime, "".join(data[mime].split()), metadata, data)
    if set(data) == {"text/plain"}:
        return f"<pre>{html.escape(data['text/plain'])}</pre>"
    return None


def _img(mime: str, encoded: str, metadata: Bundle, data: Bundle) -> str:
    about = metadata.get(mime)
    size = ""
    if isinstance(about, Mapping):
        size = "".join(f' {side}="{int(about[side])}"' for side in ("width", "height") if _is_number(about.get(side)))
    return f'<img src="data:{mime};base64,{encoded}" alt="{html.escape(title(data), quote=True)}"{size}>'


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < 100_000


def title(data: Bundle) -> str:
    """Return the text of a bundle if it is short and says something, else an empty text."""
    text = str(data.get("text/plain", "")).strip()
    return "" if "\n" in text or len(text) > 80 or _SAYS_NOTHING.fullmatch(text) else text


def nbytes(value: object) -> int:
    """Return about how large a value of a bundle is when it is sent."""
    if isinstance(value, str | bytes):
        return len(value)
    total, left = 0, [value]
    while left:
        each = left.pop()
        total += len(each) + 4 if isinstance(each, str | bytes) else 8
        if isinstance(each, Mapping):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            left += each
    return total


class _OpenHtmlError(Exception):
    """A tag is malformed, or closes an element that is not the innermost one."""


class _Elements(HTMLParser):
    """Follows which elements are open."""

    def __init__(self) -> None:
        super().__init__()
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._begin(tag, is_closed=False)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self._begin(tag, is_closed=self._draws)  # elsewhere a browser ignores the slash

    def _begin(self, tag: str, *, is_closed: bool) -> None:
        is_known = _TAG.fullmatch(self.get_starttag_text() or "") and not (self._draws and tag in _ENDS_SVG)
        if not is_known or len(self._open) >= _MAX_DEPTH:
            raise _OpenHtmlError
        if not is_closed and tag not in _NO_END:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open[-1] != tag and self._open[-1] in _MAY_LACK_END:
            self._open.pop()
        if not self._open or self._open.pop() != tag:
            raise _OpenHtmlError

    @property
    def _draws(self) -> bool:
        return "svg" in self._open or "math" in self._open

    @property
    def are_closed(self) -> bool:
        """Whether the text so far ends outside of tags, and leaves no element open that needs an end."""
        return "<" not in self.rawdata and set(self._open) <= _MAY_LACK_END


def _is_closed(text: str) -> bool:
    """Whether a piece of HTML can't change how the HTML after it is parsed; False if that would take long to find out.

    HTML with comments counts as open, since parsers differ in where comments end.
    """
    if len(text) > _MAX_PARSED or "\0" in text or _NOT_A_TAG.search(text) or _NOT_IN_HTML.search(text):
        return False
    elements = _Elements()
    try:
        elements.feed(text)
    except _OpenHtmlError:
        return False
    return elements.are_closed
