"""What stands on a message between hosts: who has sent it to whom. All that comes after it is passed on unread.

Between hosts a message is frame 0, an `Envelope`, and the frames of what it carries. So an agent knows where everything goes
without reading anything of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from monarch_kernel.net.wire.codec import Frame, WireError

__all__ = ["Beat", "Entry", "Envelope", "Leg", "open_envelope", "seal"]

MAX_HOST = (1 << 24) - 1
MAX_NAME_NBYTES = 64

_Host = Annotated[int, msgspec.Meta(ge=0, le=MAX_HOST)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Number = Annotated[int, msgspec.Meta(ge=1)]
_Name = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_NAME_NBYTES)]
_Names = Annotated[list[_Name], msgspec.Meta(min_length=1)]


class Leg(msgspec.Struct, array_like=True, gc=False):
    """A message from one host to another, for and from processes there; 0 is the controller's host.

    ``number`` counts the messages from ``source`` to ``target``. ``life`` counts the controllers: what is numbered for another
    one is not for us. Several senders have sent the very same message; each of the receivers is to have it from each.
    """

    source: _Host
    target: _Host
    number: _Number
    life: _Count
    senders: _Names
    receivers: _Names


class Entry(msgspec.Struct, array_like=True, gc=False):
    """The next ``nframes`` frames are one message, or a piece of one, that makes all these legs.

    More pieces follow if ``goes_on``; then the last frame is ``cut``, if the next piece begins with the rest of it.
    """

    legs: Annotated[list[Leg], msgspec.Meta(min_length=1)]
    nframes: _Number
    goes_on: bool = False
    is_cut: bool = False


class Beat(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """``source`` is alive: it has sent ``sent`` messages to ``target``, and has received all up to ``received`` from it.

    With ``again`` it lacks the one after that, and wants all that follow once more. With ``over`` the target was given up, and
    is to end. ``attached``: the source certainly has a way to the controller's process, which may be unable to say anything.
    """

    source: _Host
    target: _Host
    life: _Count
    sent: _Count
    received: _Count
    again: bool = False
    over: bool = False
    attached: bool = False


class Envelope(msgspec.Struct, array_like=True, gc=False):
    """Frame 0 of all that travels between hosts.

    With this message the neighbour is ``given`` so many bytes in all, and so many of his were ``taken``, envelopes not counted.
    """

    entries: list[Entry]
    beats: list[Beat]
    given: _Count = 0
    taken: _Count = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def seal(envelope: Envelope, frames: Sequence[Frame]) -> list[Frame]:
    """Make one multipart message of an envelope and what it carries."""
    return [_encoder.encode(envelope), *frames]


def open_envelope(parts: Sequence[Frame]) -> Envelope:
    """Read frame 0.

    Raises:
        WireError: it is no envelope, or the frames do not fit it.
    """
    try:
        envelope = _decoder.decode(parts[0])
    except (msgspec.DecodeError, IndexError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"no envelope: {error}") from None
    if any(entry.is_cut and not entry.goes_on for entry in envelope.entries):
        raise WireError("an envelope has a frame that goes on in no other")
    if 1 + sum(entry.nframes for entry in envelope.entries) != len(parts):
        raise WireError("an envelope does not fit its frames")
    return envelope
