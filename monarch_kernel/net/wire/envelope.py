"""Envelopes of messages between hosts: sender and receiver. An agent forwards the rest of a message unread.

Between hosts a message is frame 0, an `Envelope`, and the frames of its content. So an agent can route every message without
reading the content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from monarch_kernel.net.wire.codec import Frame, WireError

__all__ = ["Beat", "Entry", "Envelope", "Hop", "open_envelope", "seal"]

MAX_HOST = (1 << 24) - 1
MAX_NAME_NBYTES = 64

_Host = Annotated[int, msgspec.Meta(ge=0, le=MAX_HOST)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Number = Annotated[int, msgspec.Meta(ge=1)]
_Name = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_NAME_NBYTES)]
_Names = Annotated[list[_Name], msgspec.Meta(min_length=1)]


class Hop(msgspec.Struct, array_like=True, gc=False):
    """A message from one host to another, from and to processes there; 0 is the controller's host.

    ``number`` counts the messages from ``source`` to ``target``. ``epoch`` counts controllers: messages of another one are not
    for this host. Each of the senders has sent this same message, and each of the receivers gets it from each of them.
    """

    source: _Host
    target: _Host
    number: _Number
    epoch: _Count
    senders: _Names
    receivers: _Names


class Entry(msgspec.Struct, array_like=True, gc=False):
    """The next ``nframes`` frames are one message, or a piece of one, that travels on all these hops.

    More pieces follow if ``goes_on``; then the last frame is cut (``is_cut``) if the next piece starts with the rest of it.
    """

    hops: Annotated[list[Hop], msgspec.Meta(min_length=1)]
    nframes: _Number
    goes_on: bool = False
    is_cut: bool = False


class Beat(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """``source`` is alive: it has sent ``sent`` messages to ``target``, and has received all up to ``received`` from it.

    With ``again`` it lacks the following one, and requests all from there again. With ``over`` the target was given up, and
    must end. ``attached``: the source certainly has a path to the controller's process, which may be unable to send anything.
    """

    source: _Host
    target: _Host
    epoch: _Count
    sent: _Count
    received: _Count
    again: bool = False
    over: bool = False
    attached: bool = False


class Envelope(msgspec.Struct, array_like=True, gc=False):
    """Frame 0 of all that travels between hosts.

    ``given`` is the number of bytes sent to the neighbour in all, with this message, and ``taken`` the number received from it;
    envelopes do not count.
    """

    entries: list[Entry]
    beats: list[Beat]
    given: _Count = 0
    taken: _Count = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def seal(envelope: Envelope, frames: Sequence[Frame]) -> list[Frame]:
    """Join an envelope and its frames into one multipart message."""
    return [_encoder.encode(envelope), *frames]


def open_envelope(parts: Sequence[Frame]) -> Envelope:
    """Decode frame 0.

    Raises:
        WireError: it is not an envelope, or the frames do not fit it.
    """
    try:
        envelope = _decoder.decode(parts[0])
    except (msgspec.DecodeError, IndexError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not an envelope: {error}") from None
    if any(entry.is_cut and not entry.goes_on for entry in envelope.entries):
        raise WireError("an envelope has a cut frame without a next piece")
    if 1 + sum(entry.nframes for entry in envelope.entries) != len(parts):
        raise WireError("an envelope does not fit its frames")
    return envelope
