"""Encodes messages and values as frames, and decodes them.

A batch is one multipart message: frame 0 holds any number of headers (a msgpack array), the following frames hold the
out-of-band buffers of their payloads, in order. Batching makes a stream of small calls cheap: one send costs as much as
packing twenty headers.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import io
import logging
import operator
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import cloudpickle
import msgspec

from monarch_kernel.errors import PayloadError
from monarch_kernel.net.wire import messages
from monarch_kernel.net.wire.messages import Message, Payload
from monarch_kernel.net.wire.shared_classes import ByValuePickler
from monarch_kernel.net.wire.tensor_frames import APART_NBYTES, REDUCERS, find_torch
from monarch_kernel.net.wire.unpicklable import find_culprit, traced

__all__ = [
    "INLINE_NBYTES",
    "PAYLOAD_STORE",
    "Frame",
    "Packed",
    "Unreadable",
    "WireError",
    "add_messages",
    "decode_plain",
    "dump",
    "dump_bytes",
    "dump_call",
    "encode_plain",
    "join",
    "keep",
    "load",
    "load_bytes",
    "pack",
    "replace",
    "salvage_ids",
    "split",
    "trace",
]

Frame = bytes | memoryview
Pieces = Sequence[Frame]
MessageT = TypeVar("MessageT", bound=Message)

INLINE_NBYTES = 64 * 1024
"""Larger pickles travel in a separate frame, which the transport can pass on without a copy."""

_SCALARS = frozenset({type(None), bool, int, float})
_TEXTS = frozenset({str, bytes})
_SHORT = 1024

_log = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()


class _Kinds:
    """The kinds of messages that this process can read.

    Attributes:
        decoder: decodes the headers of a batch.
        with_payload: the kinds that have frames.
    """

    def __init__(self, kinds: Sequence[type[Message]]) -> None:
        self._kinds: tuple[type[Message], ...] = ()
        self.add(kinds)

    def add(self, kinds: Sequence[type[Message]]) -> None:
        """Add kinds to read.

        Raises:
            ValueError: another kind has the name of one of them.
        """
        known = {kind.__struct_config__.tag for kind in self._kinds}
        if taken := [kind.__name__ for kind in kinds if kind.__struct_config__.tag in known]:
            raise ValueError(f"there is another message {', '.join(taken)}: choose another name")
        self._kinds += tuple(kinds)
        self.decoder = msgspec.msgpack.Decoder(list[functools.reduce(operator.or_, self._kinds)])  # type: ignore[misc]
        self.with_payload = tuple(kind for kind in self._kinds if "payload" in kind.__struct_fields__)


_kinds = _Kinds(
    [
        kind
        for kind in (getattr(messages, name) for name in messages.__all__)
        if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
    ]
)


def add_messages(*kinds: type[Message]) -> None:
    """Register kinds of messages that belong to one feature.

    Each process that receives them calls this before the first arrives. The name of each kind is unique.

    Raises:
        ValueError: another kind has the name of one of them; in this case nothing is added.
    """
    _kinds.add(kinds)


class Unreadable(bytes):
    """A placeholder for a frame that could not be read; the bytes say why."""


class PayloadStore:
    """Where large pickled data is copied; by default the same place as small data.

    Attributes:
        check: raises MemoryError if there is no room for so many bytes, before anything is copied.
        keep: copies pieces of memory into one, in order.
        from_nbytes: size of the smallest data that `keep` copies.
        is_for_all: whether receivers share the memory; it is sent as it is.
    """

    def __init__(self) -> None:
        self.check: Callable[[int], None] = lambda nbytes: None
        self.keep: Callable[[Pieces], memoryview] = _join
        self.from_nbytes: float = float("inf")
        self.is_for_all: Callable[[Frame], bool] = lambda frame: False


def _join(pieces: Pieces) -> memoryview:
    return memoryview(b"".join(pieces))


PAYLOAD_STORE = PayloadStore()
"""Set by the transport, once per process."""


class WireError(ValueError):
    """A frame is not a valid message; the receiver drops and counts it."""


class Packed(NamedTuple):
    """One encoded message, which can be sent any number of times."""

    header: bytes
    frames: tuple[Frame, ...] = ()


def pack(message: Message, frames: tuple[Frame, ...] = ()) -> Packed:
    """Encode a message once, for any number of receivers; values that can't be encoded become text.

    Such values are lone surrogates (the name of a file that is not UTF-8, in an error), subclasses of str, and any result of a
    user's ``_repr_mimebundle_``.
    """
    try:
        return Packed(_encoder.encode(message), frames)
    except (UnicodeEncodeError, TypeError, OverflowError):
        return Packed(_encoder.encode(_as_plain(message)), frames)


def replace(message: MessageT, **fields: Any) -> MessageT:
    """Return a copy of a message with other values of fields."""
    return msgspec.structs.replace(message, **fields)


def encode_plain(value: Any) -> bytes:
    """Encode plain data: numbers, texts, bytes, and tuples and lists of these; no pickler is needed."""
    return _encoder.encode(value)


def decode_plain(data: bytes) -> Any:
    """Decode what `encode_plain` has made, with lists in place of tuples."""
    return msgspec.msgpack.decode(data)


def salvage_ids(parts: Sequence[Frame], *kinds: type[Message]) -> list[int]:
    """Return the ids of the requests in a multipart message that `split` rejects, as far as they can be read.

    Args:
        parts: the message.
        kinds: only ids in messages of these kinds; if there are none, in all.
    """
    try:
        headers = msgspec.msgpack.decode(parts[0])
    except (msgspec.DecodeError, IndexError, UnicodeDecodeError, RecursionError):
        return []
    if not isinstance(headers, list):
        return []
    ids = [one for one in headers if isinstance(one, list) and len(one) > 1 and type(one[1]) is int and one[1] > 0]
    tags = [kind.__struct_config__.tag for kind in kinds]
    return [id for tag, id, *_ in ids if not kinds or tag in tags]


def _as_plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_as_plain(key): _as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_plain(item) for item in value]
    if isinstance(value, msgspec.Struct):
        return type(value)(*[_as_plain(getattr(value, name)) for name in value.__struct_fields__])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: _as_plain(getattr(value, f.name)) for f in dataclasses.fields(value)})
    if value is None or isinstance(value, (bool, float, bytes, memoryview)):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return int(value)
    return _as_plain(repr(value))


def join(batch: Sequence[Packed]) -> list[Frame]:
    """Join encoded messages into one multipart message."""
    count = len(batch)
    if count == 1:
        header, frames = batch[0]
        return [b"\x91" + header, *frames]  # msgpack: an array of one
    parts: list[Frame] = [b"\xdd" + count.to_bytes(4, "big") + b"".join([one.header for one in batch])]
    for one in batch:
        parts.extend(one.frames)
    return parts


def split(parts: Sequence[Frame]) -> Iterator[tuple[Message, Sequence[Frame]]]:
    """Split a multipart message.

    Raises:
        WireError: it is not a valid message.
    """
    try:
        headers: list[Message] = _kinds.decoder.decode(parts[0])
    except (msgspec.DecodeError, IndexError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a message: {error}") from None
    taken = 1
    for message in headers:
        if isinstance(message, _kinds.with_payload):
            nframes = message.payload.nframes  # type: ignore[attr-defined]
            if nframes:
                if nframes < 0 or taken + nframes > len(parts):
                    raise WireError(f"a {type(message).__name__} lacks {taken + nframes - len(parts)} frames")
                yield message, parts[taken : taken + nframes]
                taken += nframes
                continue
        yield message, ()
    if taken != len(parts):
        raise WireError(f"{len(parts) - taken} frames belong to no message")


def _pickle(value: Any, buffers: list[pickle.PickleBuffer]) -> Pieces:
    """Pickle by the quickest correct way: objects of ``__main__`` must travel by value."""
    try:
        find_torch()
        pieces = _dump_by(_Pickler, value, buffers)
        if not any(b"__main__" in piece for piece in pieces) and not cloudpickle.list_registry_pickle_by_value():
            return pieces
    except Exception:  # the slow way supports more types, and its error is the one to report
        pass
    buffers.clear()
    return _dump_by(_ByValuePickler, value, buffers)


class _Pickler(pickle.Pickler):
    dispatch_table = ChainMap(REDUCERS, cast(dict[type, Any], copyreg.dispatch_table))  # noqa: RUF012


def _reduce_file(file: Any) -> Any:
    """Refuse an open file, of which cloudpickle would silently make a text in memory; standard streams travel by name.

    Raises:
        TypeError: it is another file, as Python's own pickler raises it.
    """
    if file is sys.stdout or file is sys.stderr:
        return cloudpickle.Pickler.dispatch_table[io.TextIOWrapper](file)
    raise TypeError(f"cannot pickle '{type(file).__module__}.{type(file).__qualname__}' object")


class _ByValuePickler(ByValuePickler):
    dispatch_table: ClassVar[ChainMap[type, Any]] = ChainMap(
        REDUCERS, {io.TextIOWrapper: _reduce_file}, cloudpickle.Pickler.dispatch_table
    )


class _File:
    """The file of a pickler; it keeps large bytes without a copy."""

    __slots__ = ("write",)

    def __init__(self, write: Callable[[Any], None]) -> None:
        self.write = write


def _dump_by(kind: type[pickle.Pickler], value: Any, buffers: list[pickle.PickleBuffer]) -> Pieces:
    pieces: list[Any] = []

    def takes(buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer stays in the pickle: a separate frame costs more than a copy of it."""
        raw = buffer.raw()
        if raw.nbytes <= APART_NBYTES and not PAYLOAD_STORE.is_for_all(raw):
            return True
        buffers.append(buffer)
        return False

    kind(_File(pieces.append), 5, buffer_callback=takes).dump(value)
    return pieces


def _kept(pieces: Pieces) -> Frame:
    if PAYLOAD_STORE.is_for_all(pieces[0]):
        return pieces[0]
    if sum(map(len, pieces)) >= PAYLOAD_STORE.from_nbytes:
        return PAYLOAD_STORE.keep(pieces)
    first = pieces[0]
    return first if len(pieces) == 1 and memoryview(first).readonly else _join(pieces)


def trace(value: Any) -> tuple[Exception | None, list[Any]]:
    """Pickle a value as `dump` does, for `find_culprit`: returns the error and the last objects."""
    return traced(_ByValuePickler)(value)


_INSTEAD: tuple[tuple[tuple[type, ...], str], ...] = (
    ((types.GeneratorType, types.AsyncGeneratorType), "send a list of its items, or each item through a Channel"),
    ((types.CoroutineType,), "await it, and send its result"),
    ((io.IOBase,), "send its path or its content, and open it there"),
)
"""What to send in place of values that can't be pickled, by their kinds."""


def _where(roots: Mapping[str, Any]) -> str:
    """Describe which part of some values can't be pickled, and what to send instead; empty if there is nothing to add."""
    try:
        culprit = find_culprit(roots, trace)
    except Exception:  # an addition to the error, which must not hide it
        _log.exception("could not find what can't be pickled")
        return ""
    if culprit is None:
        return ""
    place = "" if culprit.is_root and len(roots) == 1 else f", at {culprit.path}"
    return place + next((f"; {instead}" for kinds, instead in _INSTEAD if isinstance(culprit.value, kinds)), "")


def dump(
    value: Any, what: str = "the value", *, roots: Mapping[str, Any] | None = None
) -> tuple[Payload, tuple[Frame, ...]]:
    """Pickle a value, with separate buffers (PEP 574).

    Args:
        value: anything; functions and classes of ``__main__`` travel by value.
        what: name of the value in an error.
        roots: parts of the value with the names by which the user knows them, for the path to the part that can't be pickled.
            Without it the path starts at the last word of ``what``; if it is empty, there is no path.

    Raises:
        PayloadError: it cannot be pickled.
    """
    kind = type(value)
    is_simple = kind in _SCALARS or (kind in _TEXTS and len(value) <= _SHORT)
    if is_simple and (payload := _of_scalars(value)) is not None:
        return payload, ()
    buffers: list[pickle.PickleBuffer] = []
    try:
        data = _pickle(value, buffers)
    except Exception as error:
        where = _where({what.rpartition(" ")[2]: value} if roots is None else roots)
        raise PayloadError(f"{what} can't be pickled: {type(error).__name__}: {error}{where}") from error
    parts: list[Pieces] = [(buffer.raw(),) for buffer in buffers]
    if is_apart := sum(map(len, data)) > INLINE_NBYTES:
        parts.insert(0, data)
    # The message may be sent later, and must hold the current value: memory that can change is copied, once.
    try:
        if parts:
            PAYLOAD_STORE.check(
                sum([len(piece) for pieces in parts for piece in pieces if not PAYLOAD_STORE.is_for_all(piece)])
            )
        frames = tuple([_kept(pieces) for pieces in parts])
    except MemoryError as error:
        raise PayloadError(f"{what} can't be sent: {error or 'out of memory'}") from error
    return Payload(b"" if is_apart else b"".join(data), len(frames)), frames


def _of_scalars(value: Any) -> Payload | None:
    """Pickle a value that consists of numbers and short texts, which no pickler treats differently; None if it is large."""
    data = pickle.dumps(value, 5)
    return Payload(data) if len(data) <= INLINE_NBYTES else None


def dump_bytes(value: Any, what: str, limit_nbytes: int, *, roots: Mapping[str, Any] | None = None) -> bytes:
    """Pickle a value into one piece, for data that travels in a header; ``roots`` as for `dump`.

    Raises:
        PayloadError: it cannot be pickled, or is larger than ``limit_nbytes``.
    """
    payload, frames = dump(value, what, roots=roots)
    nbytes = len(payload.data) + sum(memoryview(frame).nbytes for frame in frames)
    if nbytes > limit_nbytes:
        raise PayloadError(
            f"{what} is too large to send: {nbytes:,} bytes, at most {limit_nbytes:,}; load its data where it runs"
        )
    return pickle.dumps((payload.data, tuple(bytes(frame) for frame in frames)), 5)


def load_bytes(data: bytes) -> Any:
    """Unpickle the result of `dump_bytes`."""
    inline, frames = pickle.loads(data)
    return load(Payload(inline, len(frames)), frames)


def dump_call(args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]) -> tuple[Payload, tuple[Frame, ...]]:
    """Pickle the arguments of a call; ``names`` are the parameters that ``args`` bind to.

    Raises:
        PayloadError: one cannot be pickled; the text names it.
    """
    for value in args:
        if (kind := type(value)) not in _SCALARS and not (kind in _TEXTS and len(value) <= _SHORT):
            break
    else:
        if not kwargs and (payload := _of_scalars((args, kwargs))) is not None:
            return payload, ()
    try:
        return dump((args, kwargs), "the arguments", roots={})
    except PayloadError as error:
        if isinstance(error.__cause__, MemoryError):  # each argument alone might find room
            raise
        labels = [names[i] if i < len(names) else f"args[{i}]" for i in range(len(args))]
        for label, value in [*zip(labels, args), *kwargs.items()]:
            dump(value, f"argument {label!r} (a {type(value).__name__})", roots={label: value})
        raise


def keep(pieces: Pieces) -> Frame:
    """Copy pieces of memory into one frame, in order; other processes of the machine can read a large one without a copy.

    Raises:
        MemoryError: there is not enough memory; the text has the figures.
    """
    PAYLOAD_STORE.check(sum(map(len, pieces)))
    return PAYLOAD_STORE.keep(pieces) if sum(map(len, pieces)) >= PAYLOAD_STORE.from_nbytes else _join(pieces)


def load(payload: Payload, frames: Sequence[Frame]) -> Any:
    """Unpickle a value; only for payloads of an authenticated peer.

    Raises:
        PayloadError: a part of it could not be read.
    """
    for frame in frames:
        if type(frame) is Unreadable:
            raise PayloadError(f"a large part of the value can't be read from shared memory: {frame.decode()}")
    if payload.data:
        return pickle.loads(payload.data, buffers=frames)
    if not payload.nframes:
        return None
    return pickle.loads(frames[0], buffers=frames[1:])
