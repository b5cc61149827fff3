"""Every message and every value survives encoding and decoding; invalid messages raise WireError, and are not unpickled."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import pickle
import subprocess
import sys
import threading
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_kernel.errors import Failure, PayloadError
from monarch_kernel.net.wire import messages
from monarch_kernel.net.wire.codec import (
    INLINE_NBYTES,
    PAYLOAD_STORE,
    Packed,
    WireError,
    dump,
    dump_call,
    join,
    load,
    pack,
    split,
)
from monarch_kernel.net.wire.messages import Failed, Message, Payload, Ping, Push, Result

KINDS = sorted(
    (
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
    ),
    key=lambda kind: kind.__name__,
)
integers = st.integers(-(2**63), 2**64 - 1)
scalars = (
    st.none() | st.booleans() | integers | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
)
plain = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))
frames_of_any = st.lists(st.binary(max_size=20), max_size=3).map(tuple)


@functools.cache  # a strategy is made and checked once, not for each example
def fitting(hint: Any, within: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Values of an annotated type; raises for an unsupported type, so that new fields enter the tests.

    ``within`` are the enclosing types; a recursive type is nested once.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    simple = {
        int: integers,
        str: st.text(max_size=20),
        bytes: st.binary(max_size=20),
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
        type(None): st.none(),
        Any: plain,
    }
    if hint in simple:
        return simple[hint]
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([fitting(arg, within) for arg in args])
    if origin is tuple and args[-1] is ...:
        return st.lists(fitting(args[0], within), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*[fitting(arg, within) for arg in args])
    if origin in (dict, collections.abc.Mapping):
        if within.count(args[1]) > 1:
            return st.just({})
        return st.dictionaries(fitting(args[0], within), fitting(args[1], within), max_size=3)
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct)):
        hints = typing.get_type_hints(hint)
        return st.builds(
            hint, **{name: fitting(kind, (*within, hint)) for name, kind in hints.items() if not name.startswith("__")}
        )
    raise NotImplementedError(hint)


@st.composite
def entries(draw: st.DrawFn, kind: type[Message] | None = None) -> tuple[Message, tuple[bytes, ...]]:
    """A message, and as many frames as its payload has."""
    message = draw(fitting(kind or draw(st.sampled_from(KINDS))))
    if not hasattr(message, "payload"):
        return message, ()
    frames = draw(frames_of_any)
    payload = Payload(message.payload.data, len(frames))
    return msgspec.structs.replace(message, payload=payload), frames


def encode(batch: Sequence[tuple[Message, tuple[bytes, ...]]]) -> list[Any]:
    return join([pack(message, frames) for message, frames in batch])


def decode(parts: Sequence[Any]) -> list[tuple[Message, tuple[bytes, ...]]]:
    return [(message, tuple(bytes(frame) for frame in frames)) for message, frames in split(parts)]


def as_data(batch: Sequence[tuple[Message, tuple[bytes, ...]]]) -> list[Any]:
    """Convert to plain data for comparison: inside ``Any`` a tuple may come out as a list."""
    return [(type(message), msgspec.msgpack.encode(message), frames) for message, frames in batch]


# -- messages


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=15)
@given(data=st.data())
def test_every_kind_survives_alone(kind: type[Message], data: st.DataObject) -> None:
    message, frames = data.draw(entries(kind))
    again = decode(encode([(message, frames)]))
    assert as_data(again) == as_data([(message, frames)])
    if not any(hint is Any or Any in typing.get_args(hint) for hint in typing.get_type_hints(kind).values()):
        assert again[0][0] == message or "region" in kind.__struct_fields__


@given(st.lists(entries(), min_size=1, max_size=20))
def test_a_batch_survives_in_order(batch: list[tuple[Message, tuple[bytes, ...]]]) -> None:
    assert as_data(decode(encode(batch))) == as_data(batch)


def test_a_message_is_packed_once_and_sent_often() -> None:
    packed = pack(Push(7, "x", Payload(b"p", 1)), (b"frame",))
    assert decode(join([packed])) == decode(join([packed]))
    assert len(decode(join([packed] * 20))) == 20


def test_a_large_batch_survives() -> None:
    batch: list[tuple[Message, tuple[bytes, ...]]] = [(Ping(i), ()) for i in range(70_000)]
    assert [message.id for message, _ in decode(encode(batch))] == list(range(70_000))  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["\udc80", "file \udcff.txt", "\ud800\udc00", "fine\n\0é😀"])
def test_text_that_is_not_unicode_is_sent_too(text: str) -> None:
    """``os.fsdecode`` returns lone surrogates for unusual file names, which then appear in error messages."""
    failure = Failure("exception", "FileNotFoundError", text, last_lines=(text,), exception=b"\x80")
    ((again, _),) = decode(join([pack(Failed(3, failure))]))
    assert isinstance(again, Failed)
    assert again.failure.exception == b"\x80"
    assert again.failure.message.encode() == text.encode("utf-8", "backslashreplace")
    assert again.failure.last_lines == (again.failure.message,)


# -- invalid messages


def check_refused_or_decoded(parts: Sequence[Any]) -> None:
    try:
        list(split(parts))
    except WireError:
        pass  # and no other exception


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_random_bytes(parts: list[bytes]) -> None:
    check_refused_or_decoded(parts)


@given(st.lists(entries(), min_size=1, max_size=4), st.data())
def test_damaged_messages(batch: list[tuple[Message, tuple[bytes, ...]]], data: st.DataObject) -> None:
    header, *frames = encode(batch)
    start = data.draw(st.integers(0, len(header)))
    damage = data.draw(st.sampled_from(["truncate", "flip", "insert"]))
    noise = data.draw(st.binary(min_size=1, max_size=3))
    if damage == "truncate":
        header = header[:start]
    else:
        header = header[:start] + noise + header[start + (len(noise) if damage == "flip" else 0) :]
    check_refused_or_decoded([header, *frames])


class Text(str):
    """A text of a class of the user."""


@pytest.mark.parametrize(
    "args",
    [
        (),
        (None, True, 1.5, -7),
        ("text", b"bytes"),
        ("\ud800",),
        (2**70,),
        (1 << 600_000,),
        ("x" * 100_000, 1),
        (Text("a"), 1),
    ],
    ids=["none", "numbers", "texts", "surrogate", "big", "huge", "long", "class"],
)
def test_arguments_of_calls_arrive_equal(args: tuple[Any, ...]) -> None:
    for values, kwargs in ((args, {}), (args[:1], {"last": args[-1] if args else None})):
        arrived, named = load(*dump_call(values, kwargs, ()))
        assert (arrived, named) == (values, kwargs)
        assert [*map(type, arrived)] == [*map(type, values)]
    for value in args:
        assert load(*dump(value)) == value


@given(st.sampled_from(KINDS), st.lists(scalars | st.lists(scalars, max_size=3), max_size=8))
def test_fields_of_wrong_types(kind: type[Message], fields: list[Any]) -> None:
    check_refused_or_decoded([msgspec.msgpack.encode([[kind.__name__, *fields]])])


@given(st.lists(entries(), min_size=1, max_size=4), st.data())
def test_frames_that_are_missing_or_too_many(
    batch: list[tuple[Message, tuple[bytes, ...]]], data: st.DataObject
) -> None:
    header, *frames = encode(batch)
    count = data.draw(st.integers(0, len(frames) + 2).filter(lambda count: count != len(frames)))
    with pytest.raises(WireError):
        list(split([header, *[*frames, b"", b""][:count]]))


@pytest.mark.parametrize("nframes", [-1, 1, 2**63, 2**64 - 1, -(2**63)])
def test_impossible_numbers_of_frames(nframes: int) -> None:
    with pytest.raises(WireError):
        next(split([b"\x91" + msgspec.msgpack.encode(Result(1, Payload(b"", nframes)))]))


@pytest.mark.parametrize(
    "header",
    [b"", b"\x91", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff", b"\x91\x94\xa4Rich\x01\x81\xa1a" + b"\x91" * 100_000],
    ids=["empty", "cut off", "nested", "endless", "nested in a field"],
)
def test_hostile_headers(header: bytes) -> None:
    with pytest.raises(WireError):
        list(split([header]))


def test_no_frame_at_all() -> None:
    with pytest.raises(WireError):
        list(split([]))


class Bomb:
    went_off = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _go_off, ()


def _go_off() -> None:
    Bomb.went_off += 1


def test_split_unpickles_nothing() -> None:
    Bomb.went_off = 0
    payload, frames = dump([Bomb(), np.arange(10)])
    parts = join([pack(Push(1, "x", payload), frames)])
    for some in (parts, parts[:1], [*parts, pickle.dumps(Bomb())], [pickle.dumps(Bomb())]):
        check_refused_or_decoded(some)
    assert Bomb.went_off == 0
    load(payload, frames)
    assert Bomb.went_off == 1


# -- values


def travel(value: object) -> Any:
    """Return a value as it arrives: through the header and its frames."""
    payload, frames = dump(value)
    ((message, arrived),) = split([bytes(part) for part in join([pack(Push(1, "x", payload), frames)])])
    return load(message.payload, arrived)  # type: ignore[attr-defined]


picklable = st.recursive(
    scalars | st.complex_numbers(allow_nan=False) | st.frozensets(st.integers()),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(picklable)
def test_plain_values(value: object) -> None:
    assert travel(value) == value


@given(
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from(["<i8", ">f4", "?", "c16", "S3", "U2"]),
    st.sampled_from(["C", "F", "reversed", "strided", "transposed", "readonly"]),
)
def test_arrays(shape: list[int], dtype: str, layout: str) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    if layout == "F":
        array = np.asfortranarray(array)
    elif layout == "reversed" and shape:
        array = array[::-1]
    elif layout == "strided" and shape:
        array = array[..., ::2]
    elif layout == "transposed":
        array = array.T
    elif layout == "readonly":
        array.flags.writeable = False
    again = travel([array, "between", array])
    for one in (again[0], again[2]):
        assert one.dtype == pickle.loads(pickle.dumps(array, 5)).dtype  # numpy itself may drop the byte order
        np.testing.assert_array_equal(one, array)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3),
        lambda: torch.randn(300, 100),
        lambda: torch.randn(3, 4).t(),
        lambda: torch.randn(300, 1, 400).permute(2, 1, 0),
        lambda: torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last),
        lambda: torch.randn(100, 100).to(torch.float8_e4m3fn),
        lambda: torch.randn(3) > 0,
        lambda: torch.arange(70_000).to(torch.uint16),
        lambda: torch.randn(300, dtype=torch.complex64).conj(),
        lambda: torch.randn(300, 100, requires_grad=True),
        lambda: torch.randn(3, dtype=torch.bfloat16),
        lambda: torch.randn(3, dtype=torch.complex64),
        lambda: torch.tensor(1.0),
        lambda: torch.zeros(0, 3),
        lambda: torch.randn(3).expand(4, 3),
        lambda: torch.randn(3, requires_grad=True),
        lambda: torch.nn.Parameter(torch.randn(3)),
        lambda: torch.eye(4).to_sparse(),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")  # by torch 2.11
def test_tensors(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    again = travel([tensor, "between", tensor])
    assert again[0] is again[2]
    assert torch.equal(again[0].to_dense(), tensor.to_dense())
    assert (type(again[0]), again[0].dtype, again[0].requires_grad) == (
        type(tensor),
        tensor.dtype,
        tensor.requires_grad,
    )
    assert again[0].layout != torch.strided or again[0].stride() == tensor.stride()


def test_memory_of_tensors_travels_apart_and_is_writable_in_the_receiver() -> None:
    tensor = torch.zeros(1 << 16)
    payload, frames = dump({"a": tensor, "b": torch.nn.Linear(3, 4)})
    assert [len(frame) for frame in frames] == [tensor.nbytes]  # small ones do not
    assert len(payload.data) < 1000
    tensor += 1  # as if after it was sent
    landed = [bytearray(frame) for frame in frames]
    again = load(payload, landed)
    assert not again["a"].any()
    again["a"] += 2
    assert np.frombuffer(landed[0], "f4")[0] == 2  # the tensor is in the received memory
    small = travel(torch.zeros(3))
    small.resize_(100)  # this memory belongs to torch


def test_only_the_elements_of_a_view_are_sent() -> None:
    view = torch.arange(100_000.0)[10:13]
    assert len(dump(view)[0].data) < 300
    assert travel(view).tolist() == [10, 11, 12]
    view.note = "mine"
    assert len(dump(view)[0].data) < 400
    assert travel(view).tolist() == [10, 11, 12]
    assert travel(view).note == "mine"
    _, frames = dump(torch.arange(100_000.0).view(100, 1000)[20:40])
    assert [len(frame) for frame in frames] == [80_000]


def test_tensors_beside_classes_of_the_notebook_travel_apart_too() -> None:
    class Local:
        tensor = torch.ones(1 << 16)

    payload, frames = dump([Local, torch.ones(1 << 15)])
    assert sorted(len(frame) for frame in frames) == [1 << 17, 1 << 18]
    assert torch.equal(travel(Local).tensor, torch.ones(1 << 16))
    assert payload.nframes == 2


def test_buffers_of_arrays_travel_apart() -> None:
    array = np.arange(1000)
    payload, frames = dump({"a": array, "b": array * 2})
    assert payload.nframes == len(frames) == 2
    assert len(payload.data) < 500
    assert not np.shares_memory(np.frombuffer(frames[0], array.dtype), array)  # it may change before it is sent


@pytest.mark.parametrize("nbytes", [INLINE_NBYTES - 1000, INLINE_NBYTES + 1, 10 * INLINE_NBYTES])
def test_large_pickles_travel_in_a_separate_frame(nbytes: int) -> None:
    value = ["x" * nbytes, np.arange(1000)]
    payload, frames = dump(value)
    assert (payload.data == b"") == (nbytes > INLINE_NBYTES)
    assert payload.nframes == len(frames) == 1 + (nbytes > INLINE_NBYTES)
    again = travel(value)
    assert again[0] == value[0]
    np.testing.assert_array_equal(again[1], value[1])


def test_nothing_is_none() -> None:
    assert load(Payload(), ()) is None
    assert travel(None) is None


def test_lambdas_closures_and_local_classes() -> None:
    class Local:
        def double(self, x: int) -> int:
            return 2 * x

    offset = 5
    assert travel(lambda x: x + offset)(1) == 6
    assert travel(Local().double)(4) == 8
    assert travel([1, (lambda: {"a": lambda: offset})])[1]()["a"]() == 5


MAIN = """
import functools, sys
import numpy as np
from monarch_kernel.net.wire.codec import dump, join, pack
from monarch_kernel.net.wire.messages import Push

FACTOR = 3

class Scale:
    def __init__(self, by):
        self.by = by
    def __call__(self, x):
        return FACTOR * self.by * x

def scale(by, x):
    return Scale(by)(x)

class Array(np.ndarray):
    def tripled(self):
        return FACTOR * self

value = [Scale, Scale(2), functools.partial(scale, 5), np.arange(4).view(Array)]
payload, frames = dump(value)
for part in join([pack(Push(1, "x", payload), frames)]):
    part = bytes(part)
    sys.stdout.buffer.write(len(part).to_bytes(8, "big") + part)
"""


def test_objects_of_main_travel_by_value() -> None:
    run = subprocess.run([sys.executable, "-c", MAIN], capture_output=True, check=False)
    assert run.returncode == 0, run.stderr.decode()
    rest, parts = run.stdout, []
    while rest:
        nbytes = int.from_bytes(rest[:8], "big")
        parts.append(rest[8 : 8 + nbytes])
        rest = rest[8 + nbytes :]
    ((message, frames),) = split(parts)
    cls, instance, partial, array = load(message.payload, frames)  # type: ignore[attr-defined]
    assert not hasattr(sys.modules["__main__"], "Scale")
    assert cls(7)(1) == 21
    assert instance(1) == 6
    assert partial(1) == 15
    assert array.tripled().tolist() == [0, 3, 6, 9]


class Unpicklable:
    def __reduce__(self) -> tuple[Any, ...]:
        raise RuntimeError("stays here")


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((1, threading.Lock()), {}, ["'second'", "lock"]),
        ((1, 2, Unpicklable()), {}, ["'args[2]'", "Unpicklable", "stays here"]),
        ((), {"lr": 1, "model": Unpicklable()}, ["'model'", "Unpicklable", "RuntimeError"]),
        ((Unpicklable(),), {"model": Unpicklable()}, ["'first'"]),
    ],
)
def test_an_argument_that_cannot_be_sent_is_named(
    args: tuple[Any, ...], kwargs: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(PayloadError) as caught:
        dump_call(args, kwargs, ("first", "second"))
    for word in named:
        assert word in str(caught.value)
    assert isinstance(caught.value, TypeError)
    assert caught.value.__cause__ is not None


def test_a_value_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(PayloadError, match="the result can't be pickled"):
        dump(Unpicklable(), "the result")


def test_a_call_survives_encoding() -> None:
    payload, frames = dump_call((1, np.arange(3)), {"k": "v"}, ("a", "b"))
    args, kwargs = load(payload, frames)
    assert args[0] == 1
    assert args[1].tolist() == [0, 1, 2]
    assert kwargs == {"k": "v"}


def test_packed_is_a_plain_pair() -> None:
    assert pack(Ping(1)) == Packed(msgspec.msgpack.encode(Ping(1)), ())


def test_a_value_that_does_not_fit_is_refused_before_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def check(nbytes: int) -> None:
        asked.append(nbytes)
        raise MemoryError("20.0 GiB are needed, and there are 1.0 GiB of free memory")

    monkeypatch.setattr(PAYLOAD_STORE, "check", check)
    monkeypatch.setattr(PAYLOAD_STORE, "from_nbytes", 1000)
    monkeypatch.setattr(PAYLOAD_STORE, "keep", lambda pieces: pytest.fail("copied"))
    tensors = list(torch.ones(4, 1000))  # views
    with pytest.raises(PayloadError, match=r"^the arguments can't be sent: 20.0 GiB are needed, and"):
        dump_call((tensors, b"x" * 100_000), {}, ("tensors", "data"))
    (nbytes,) = asked  # the arguments are not tried one by one
    assert 116_000 < nbytes < 117_000


def test_large_bytes_are_pickled_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(10 * INLINE_NBYTES)
    kept: list[list[Any]] = []
    monkeypatch.setattr(PAYLOAD_STORE, "keep", lambda pieces: kept.append(list(pieces)) or memoryview(b"".join(pieces)))
    monkeypatch.setattr(PAYLOAD_STORE, "from_nbytes", 1000)
    payload, frames = dump(["before", data, "after"])
    assert any(piece is data for piece in kept[0])
    assert load(payload, frames) == ["before", data, "after"]
